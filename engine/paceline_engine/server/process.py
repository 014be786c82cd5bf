"""The life of the API process: bind, start the core, serve, drain, leave. No core outlives it.

Order matters for a fast start: ports are taken first (a busy one fails at once), then the core is started, which
loads torch and the weights, and only then FastAPI and the tokenizer load beside it. Exit codes: 0 done, 1 failed,
2 bad input.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from paceline_engine.core_client import CoreClient, CoreError, CoreProcess
from paceline_engine.models.loader import LoadedModel, cached_model_dir, load_model_dir, prepare_model
from paceline_engine.models.source import ModelSource, resolve
from paceline_engine.server.options import BadInput, Ports, ServeOptions, bind_ports, read_text, read_token
from paceline_engine.sizing import size_blocks

CLOSE_TIMEOUT_SECONDS = 3
# For a tier that doesn't end with its time.
FLUSH_GRACE_SECONDS = 1.0
# Longer than clients keep an idle connection (the openai client: 5 s), or one could be closed as a request comes in.
KEEP_ALIVE_SECONDS = 75
GPU_DRIVER = Path("/dev/nvidiactl")

logger = logging.getLogger(__name__)


def serve(options: ServeOptions) -> int:
    """Run until told to stop; the exit code. Raises BadInput or ModelError with nothing left running."""
    begin = time.monotonic()
    token = read_token(options.internal_token_file)
    template = read_text(options.chat_template, "--chat-template")
    options.core_config(Path())
    source = resolve(options.model)
    signal.signal(signal.SIGTERM, _leave_early)
    ports = bind_ports(options)
    core: CoreProcess | None = None
    try:
        cached = cached_model_dir(source, options.cache_dir)
        if cached is not None:
            core = start_core(options, load_model_dir(cached))
        app = _App(options, ports, source, token, template, begin)
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            return runner.run(app.run(core))
    finally:
        if core is not None:
            core.kill()
        ports.close()


def start_core(options: ServeOptions, model: LoadedModel) -> CoreProcess:
    """Start the core on a converted model, once its sizes are known to work. Raises BadInput."""
    config = options.core_config(model.directory)
    if config.speculative_model:
        drafter = prepare_model(resolve(config.speculative_model), options.cache_dir)
        config = replace(config, speculative_model=str(drafter))
    # What a GPU's memory comes to, only the core finds out.
    if config.device != "cuda" and not (config.device == "auto" and GPU_DRIVER.exists()):
        try:
            size_blocks(config, model.config)
        except ValueError as error:
            raise BadInput(str(error)) from error
    return CoreProcess(config)


def _leave_early(_number: int, _frame: object) -> None:
    """SIGTERM before there is an event loop: nothing runs yet, so leave at once, through every `finally`."""
    raise SystemExit(0)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop, where it is installed (not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _App:
    """One run: servers, core and signals on one event loop."""

    def __init__(
        self,
        options: ServeOptions,
        ports: Ports,
        source: ModelSource,
        token: str | None,
        template: str | None,
        begin: float,
    ) -> None:
        self._options = options
        self._ports = ports
        self._source = source
        self._token = token
        self._template = template
        self._begin = begin
        self._client: CoreClient | None = None
        self._compiler: Any = None
        self._gpus: Any = None
        self._exit_code: asyncio.Future[int]
        self._drain_task: asyncio.Task[None] | None = None
        self._death_task: asyncio.Task[None] | None = None
        self._drain_end = float("inf")
        self._asked_to_leave = False

    async def run(self, core: CoreProcess | None) -> int:
        """Serve until a signal, a fatal error or the core's death decides the exit code."""
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number))
        servers, engine = self._build()
        serving = [loop.create_task(server.serve(sockets=[sock])) for server, sock in servers]
        loading = loop.create_task(self._load(engine, core))
        try:
            await asyncio.wait({self._exit_code, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await self._exit_code
            return self._exit_code.result()
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            if self._compiler is not None:
                await self._compiler.close()
            if self._client is not None:
                drained = self._drain_task is not None and self._drain_task.done()
                await self._client.stop(max(0.0, self._drain_end - time.monotonic()) if drained else 0.0)
            for server, _ in servers:
                server.should_exit = True
            await asyncio.gather(*serving, return_exceptions=True)

    def _build(self) -> tuple[list[tuple[Any, socket.socket]], Any]:
        """Servers and engine; their imports are the slow part and overlap the core's."""
        from prometheus_client import CollectorRegistry, disable_created_metrics

        from paceline_engine.metrics import EngineMetrics
        from paceline_engine.server.admin import build_admin_app, build_metrics_app
        from paceline_engine.server.engine import Engine
        from paceline_engine.server.routes import build_http_app
        from paceline_engine.telemetry.collector import GpuCollector
        from paceline_engine.telemetry.nvml import open_gpus
        from paceline_engine.telemetry.watch import GpuWatch

        disable_created_metrics()  # a second series for every counter that nobody queries
        registry = CollectorRegistry()
        model_name = self._options.served_model_name
        metrics = EngineMetrics(registry, model_name)
        gpus = self._gpus = GpuWatch(open_gpus)
        registry.register(GpuCollector(model_name, lambda: gpus.readings, metrics.device_counters))
        if self._options.core["kv_store"]:
            from paceline_kvstore.exposition import StoreCollector

            registry.register(StoreCollector(self._store_counts))
        engine = self._engine = Engine(
            model_name=model_name,
            metrics=metrics,
            progress_timeout=self._options.progress_timeout,
            config_hash=self._options.config_hash,
        )
        apps = (
            (build_http_app(engine, self._token), self._ports.http),
            (build_admin_app(engine, self._token, self._drain), self._ports.admin),
            (build_metrics_app(registry, gpus.refresh), self._ports.metrics),
        )
        for name, sock in (("http", self._ports.http), ("admin", self._ports.admin), ("metrics", self._ports.metrics)):
            logger.info("%s listens on %s port %d", name, *sock.getsockname()[:2])
        return [(_server(app), sock) for app, sock in apps], engine

    def _store_counts(self) -> Any:
        """The KV store's snapshot that the core sent last; one of no tiers before the first."""
        from paceline_kvstore.metrics import NOTHING, StoreSnapshot

        counts = self._client.kv_store if self._client is not None else None
        return NOTHING if counts is None else convert(counts, StoreSnapshot)

    async def _load(self, engine: Any, core: CoreProcess | None) -> None:
        """Convert if need be, start the core if that is not done, load the tokenizer, wait for the core."""
        from paceline_engine.server.loading import make_serving
        from paceline_engine.tokenizer import Tokenizer

        options = self._options
        prepared = await asyncio.to_thread(prepare_model, self._source, options.cache_dir, options.cache_limit)
        model = load_model_dir(prepared)
        process = core if core is not None else start_core(self._options, model)
        client = self._client = CoreClient(
            process,
            max_live=self._options.max_live,
            on_stats=engine.metrics.on_stats,
            on_kv_events=engine.events.add,
        )
        client.dead.add_done_callback(lambda dead: self._on_core_death(engine, dead))
        tokenizer = await asyncio.to_thread(Tokenizer, model.tokenizer_file)
        serving = make_serving(self._options, model, tokenizer, self._template, client)
        self._compiler = serving.compiler
        ready = await client.ready
        seconds = time.monotonic() - self._begin
        engine.metrics.on_ready(ready, seconds)
        self._gpus.start(ready.gpus)
        engine.set_serving(serving.with_core(ready))
        logger.info(
            "ready after %.1f s: %d blocks of %d tokens, at most %d tokens a request",
            seconds,
            ready.num_blocks,
            ready.block_size,
            ready.max_model_len,
        )

    def _on_core_death(self, engine: Any, dead: asyncio.Future[str]) -> None:
        """Answers in flight get their error event first, then the process leaves."""
        engine.fail(dead.result())

        async def leave() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.idle.wait(), CLOSE_TIMEOUT_SECONDS)
            self._leave(1)

        if not self._exit_code.done():
            self._death_task = asyncio.ensure_future(leave())

    def _on_signal(self, number: signal.Signals) -> None:
        if self._asked_to_leave:
            logger.warning("%s again: stopping now", number.name)
            self._leave(1 if self._engine.in_flight else 0)
            return
        self._asked_to_leave = True
        logger.info("%s: draining for at most %g s", number.name, self._options.drain_timeout)
        self._drain(self._options.drain_timeout)

    def _drain(self, seconds: float) -> None:
        """Stop admitting; the earliest deadline asked for holds."""
        self._engine.start_draining()
        end = time.monotonic() + seconds
        if self._drain_task is not None and (self._drain_end <= end and not self._asked_to_leave):
            return
        self._drain_end = min(self._drain_end, end)
        if self._drain_task is not None:
            self._drain_task.cancel()
        self._drain_task = asyncio.ensure_future(self._finish_draining())

    async def _finish_draining(self) -> None:
        """Wait for what runs, end the rest at the deadline, have KV written, and leave if that was asked."""
        engine, cut = self._engine, 0
        try:
            await asyncio.wait_for(engine.idle.wait(), max(0.0, self._drain_end - time.monotonic()))
        except TimeoutError:
            cut = engine.in_flight
            logger.warning("drain deadline: ending %d requests that still run", cut)
            if self._client is not None:
                self._client.abort_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.idle.wait(), CLOSE_TIMEOUT_SECONDS)
        await self._flush_kv()
        if self._asked_to_leave:
            logger.info("drained: leaving")
            self._leave(1 if cut else 0)

    async def _flush_kv(self) -> None:
        """Have what only memory has written to where it outlives this process, in what is left of the drain's time."""
        seconds, client, is_flushed = max(0.0, self._drain_end - time.monotonic()), self._client, True
        if client is not None and client.ready.done():
            try:
                asked = client.command("flush", seconds=f"{seconds:.3f}")
                is_flushed = bool((await asyncio.wait_for(asked, seconds + FLUSH_GRACE_SECONDS)).get("flushed"))
            except (CoreError, TimeoutError) as error:
                logger.warning("not all KV is written: %s", error or "the time is up")
                is_flushed = False
        self._engine.kv_flush = "done" if is_flushed else "failed"

    def _leave(self, code: int) -> None:
        if not self._exit_code.done():
            self._exit_code.set_result(code)


def _server(app: Any) -> Any:
    """A uvicorn server that leaves signals to us."""
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn without its signal handlers: one process has three of these."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Nothing to capture."""
            yield

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_SECONDS,
    )
    return Server(config)
