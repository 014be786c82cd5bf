"""The core process: receive, schedule, execute, update, send, for as long as its parent lives.

Start it with `spawn`, or as `python -m paceline_engine.core_process ADDRESS_IN ADDRESS_OUT PARENT_PID` with the
configuration as JSON in $PACELINE_CORE_CONFIG. The API process binds both ZMQ addresses, this one connects: it pulls
`ToCore` messages from ADDRESS_IN and pushes `FromCore` messages to ADDRESS_OUT, as msgpack. The first message is
CoreReady or CoreFailed; then a StepOutputs for each step that has outputs, and one at least every QUIET_SECONDS of
steps, every HEARTBEAT_SECONDS when idle. Text, HTTP and tokenizers stay on the other side. Imports torch only through
the backend that the configuration names.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from paceline_engine.backends.base import Closes, UsesGpus
from paceline_engine.config import EngineConfig
from paceline_engine.core.bundles import Bundles
from paceline_engine.core.step_log import RecordingStore, StepLog
from paceline_engine.core_commands import Commands, FollowsConstraints, handle_grammar
from paceline_engine.core_loop import OverlappedSteps, Steps
from paceline_engine.core_setup import Core, build_core
from paceline_engine.messages import (
    AbortRequest,
    AddRequest,
    Command,
    CommandResult,
    CoreFailed,
    CoreReady,
    CoreStats,
    DropGrammar,
    FromCore,
    LoadGrammar,
    PrepareGrammars,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StoreNews,
    ToCore,
)
from paceline_engine.parent import die_with_parent
from paceline_engine.sizing import SetupError
from paceline_kvstore.metrics import snapshot

HEARTBEAT_SECONDS = 0.5
STORE_COUNT_SECONDS = 1.0
# Of steps without outputs: statistics are so old at most.
QUIET_SECONDS = 0.1
MAX_MESSAGES_PER_STEP = 4096
HAND_OVER_SECONDS = 5.0
INTERNAL_ADDRESS = "inproc://inbox"
CONFIG_VARIABLE = "PACELINE_CORE_CONFIG"
CONNECT_TIMEOUT_MS = 30_000

logger = logging.getLogger(__name__)


class CoreLoop:
    """The loop over a loaded core. `receive(seconds)` gives the next message or None; `clock` gives seconds.

    post: gives `receive` a message, from any thread.
    """

    def __init__(
        self,
        core: Core,
        receive: Callable[[float], ToCore | None],
        send: Callable[[FromCore], None],
        clock: Callable[[], float] = time.monotonic,
        post: Callable[[ToCore], None] = lambda _: None,
    ) -> None:
        self._post = post
        self._prefixes, self._warm_up = core.prefixes, core.warm_up
        self._count_store_at = 0.0
        self._handoffs = core.handoffs
        core.handoffs.on_news(lambda: post(StoreNews()))
        if core.prefixes is not None:
            core.prefixes.on_news(lambda: post(StoreNews()))
        self._scheduler = core.scheduler
        self._backend = core.backend
        store = core.scheduler.kv.store
        self._log = StepLog(core.scheduler, store if isinstance(store, RecordingStore) else None)
        explain_stored = core.prefixes.explain if core.prefixes is not None else dict[str, str]
        self._commands = Commands(core.scheduler, core.backend, self._log, core.handoffs, explain_stored)
        self._receive = receive
        self._send = send
        self._clock = clock
        self._stopping = False
        self._bundles = Bundles()
        self._last_sent = clock()
        make_steps = OverlappedSteps if core.overlapped else Steps
        self._steps = make_steps(core.scheduler, core.backend, self._log, clock)

    def run(self) -> None:
        """Step until Shutdown; requests that live then end with "abort"."""
        while not self._stopping:
            settled = self._steps.settle() if self._log.is_full or not self._scheduler.has_work else []
            self._log.begin()
            outputs, results = self._drain(0.0 if settled else self._wait_seconds())
            outputs = settled + outputs
            if self._stopping:
                outputs += self._steps.settle() + self._scheduler.abort_all()
            elif self._scheduler.has_work:
                outputs += self._steps.step()
            self._tell(outputs, results)
        self._steps.close()
        if self._scheduler.kv.stored is not None:
            self._scheduler.kv.stored.offer_all()
        if self._warm_up is not None:
            self._warm_up.save()

    def _tell(self, outputs: list[RequestOutput], results: list[CommandResult]) -> None:
        """Send what there is to say; nothing, if that is only how a busy core stands, and was said a moment ago."""
        now, cache = self._clock(), self._scheduler.kv.cache
        outputs = self._bundles.take(self._handoffs.settled(outputs, is_last=self._stopping), now)
        is_busy = self._scheduler.has_work and now < self._last_sent + QUIET_SECONDS
        if is_busy and not outputs and not results:
            return
        self._last_sent = now
        self._send(
            StepOutputs(
                outputs=tuple(outputs),
                results=tuple(results),
                kv_events=cache.take_events() if cache is not None else (),
                stats=self._stats(),
                kv_store=self._store_counts(),
            )
        )

    def _wait_seconds(self) -> float:
        """How long to listen before the next step: not at all, unless a step would have nothing to do."""
        if not self._scheduler.has_work:
            return HEARTBEAT_SECONDS
        return min(HEARTBEAT_SECONDS, self._scheduler.seconds_to_wait(self._clock()))

    def _drain(self, wait_seconds: float) -> tuple[list[RequestOutput], list[CommandResult]]:
        """Take what has arrived, waiting only for the first message; bounded, so that a flood can't stop the steps."""
        outputs: list[RequestOutput] = []
        results: list[CommandResult] = []
        for index in range(MAX_MESSAGES_PER_STEP):
            message = self._receive(wait_seconds if index == 0 else 0.0)
            if message is None:
                break
            self._handle(message, outputs, results)
            if self._stopping:
                break
        return outputs, results

    def _handle(self, message: ToCore, outputs: list[RequestOutput], results: list[CommandResult]) -> None:
        answer: RequestOutput | None = None
        match message:
            case Command(name="flush"):
                outputs += self._steps.settle()
                self._flush(message.command_id, float(message.arguments.get("seconds", "0")))
            case Command():
                outputs += self._steps.settle()
                result, ended = self._commands.run(message, self._clock())
                results.append(result)
                outputs += ended
            case AddRequest():
                now = self._clock()
                self._log.added(message, now)
                self._handoffs.arrived(message)
                answer = self._scheduler.add(message, now)
                if message.bundled:
                    self._bundles.follow(message.request_id)
            case AbortRequest():
                self._log.aborted(message.request_id)
                answer = self._scheduler.abort(message.request_id) or self._handoffs.aborted(message.request_id)
            case PrepareGrammars() | LoadGrammar() | DropGrammar():
                handle_grammar(self._backend, message, self._post)
            case CommandResult():
                results.append(message)
            case Shutdown(flush_s=seconds):
                self._stopping = True
                if self._prefixes is not None:
                    self._prefixes.drain(seconds)
            case StoreNews():
                pass  # The next step asks.
        if answer is not None:
            outputs.append(answer)

    def _store_counts(self) -> dict[str, Any] | None:
        """Too much for every step."""
        now = self._clock()
        if self._prefixes is None or now < self._count_store_at:
            return None
        self._count_store_at = now + STORE_COUNT_SECONDS
        return snapshot(self._prefixes.store).to_dict()

    def _flush(self, command_id: str, seconds: float) -> None:
        """Have the store write what it hasn't, in a thread, and answer whether it has. It takes nothing any more."""
        prefixes, stored = self._prefixes, self._scheduler.kv.stored
        if prefixes is None or stored is None:
            self._post(CommandResult(command_id=command_id, values={"flushed": True}))
            return
        # The loop waits for room now, and must be heard of again before it is taken for dead.
        prefixes.drain(min(seconds, HAND_OVER_SECONDS))
        stored.offer_all()
        if self._warm_up is not None:
            self._warm_up.save()

        def flush() -> None:
            is_flushed = prefixes.flush(seconds)
            self._post(CommandResult(command_id=command_id, values={"flushed": is_flushed}))

        threading.Thread(target=flush, name="kv-flush", daemon=True).start()

    def _stats(self) -> CoreStats:
        scheduler, kv = self._scheduler, self._scheduler.kv
        cache, spec, speed = kv.cache, scheduler.speculation.counters, scheduler.speed
        return CoreStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=kv.pool.num_blocks,
            num_free_blocks=kv.pool.num_free_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._steps.num_steps,
            num_scheduled_tokens=scheduler.num_scheduled_tokens,
            step_seconds=self._steps.step_seconds,
            kv_offloaded_sequences=kv.num_offloaded_sequences,
            kv_restored_sequences=kv.num_restored_sequences,
            kv_store_bytes=self._backend.kv_store_bytes,
            kv_loaded_tokens=dict(kv.stored.num_loaded_tokens) if kv.stored is not None else {},
            kv_dropped_chunks=kv.stored.num_dropped_offers if kv.stored is not None else 0,
            num_cached_blocks=kv.pool.num_cached_blocks,
            prefix_query_tokens=cache.num_query_tokens if cache is not None else 0,
            prefix_hit_tokens=cache.num_hit_tokens if cache is not None else 0,
            spec_drafts=spec.num_drafts,
            spec_draft_tokens=spec.num_draft_tokens,
            spec_accepted_tokens=spec.num_accepted_tokens,
            spec_accepted_per_position=tuple(spec.per_position),
            step_alpha_seconds=speed.alpha,
            step_beta_seconds=speed.beta,
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            num_deadline_refusals=scheduler.arrivals.num_deadline_refusals,
            num_deadline_misses=scheduler.num_deadline_misses,
            num_queue_refusals=scheduler.arrivals.num_queue_refusals,
            waiting_reasons=scheduler.waiting_reasons(),
            asleep=scheduler.arrivals.asleep,
            handoffs=self._handoffs.counts,
            kv_leases=self._handoffs.leases,
            device=dict(self._backend.stats),
        )


def run(config: EngineConfig, address_in: str, address_out: str, parent_pid: int | None = None) -> int:
    """Load the model and serve until Shutdown; the process's exit code. Must be called from the main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.
    die_with_parent(os.getppid() if parent_pid is None else parent_pid)
    begin = time.monotonic()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    monitor = inbox.get_monitor_socket(zmq.EVENT_CONNECTED)
    inbox.connect(address_in)
    inbox.bind(INTERNAL_ADDRESS)
    outbox.connect(address_out)
    decoder = msgspec.msgpack.Decoder(ToCore)
    encoder = msgspec.msgpack.Encoder()

    def receive(seconds: float) -> ToCore | None:
        if not inbox.poll(int(seconds * 1000)):
            return None
        return decoder.decode(inbox.recv())

    def send(message: FromCore) -> None:
        outbox.send(encoder.encode(message))

    core: Core | None = None
    try:
        core = build_core(config)
        # The API process removes the sockets' paths when it hears "ready"; a connection still to be made would be lost.
        if not monitor.poll(CONNECT_TIMEOUT_MS):
            raise ValueError("the API process can't be reached; start the engine again")
        inbox.disable_monitor()
        if core.warm_up is not None:
            core.warm_up.run(core.scheduler.kv)
        send(_ready(core, time.monotonic() - begin))
        CoreLoop(core, receive, send, post=_poster(context)).run()
    except Exception as error:
        logger.error("the engine core failed: %s", error, exc_info=not isinstance(error, SetupError))
        send(CoreFailed(message=_one_line(error)))
        return 1
    finally:
        if core is not None:
            core.handoffs.close()
        if core is not None and core.prefixes is not None:
            core.prefixes.close()
        context.destroy(linger=1000)
        if core is not None and isinstance(core.backend, Closes):
            core.backend.close()
    return 0


def _poster(context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[ToCore], None]:
    """Puts a message into this process's own inbox. Sockets belong to one thread, so each thread gets one."""
    local = threading.local()
    encoder = msgspec.msgpack.Encoder()

    def post(message: ToCore) -> None:
        if not hasattr(local, "socket"):
            local.socket = context.socket(zmq.PUSH)
            local.socket.connect(INTERNAL_ADDRESS)
        local.socket.send(encoder.encode(message))

    return post


def _ready(core: Core, load_seconds: float) -> CoreReady:
    return CoreReady(
        num_blocks=core.scheduler.kv.pool.num_blocks,
        block_size=core.scheduler.kv.block_size,
        max_model_len=core.max_model_len,
        namespace_digest=core.namespace_digest,
        load_seconds=load_seconds,
        follows_constraints=isinstance(core.backend, FollowsConstraints),
        lends=core.handoffs.lends,
        gpus=core.backend.gpus if isinstance(core.backend, UsesGpus) else (),
    )


def _one_line(error: Exception) -> str:
    """A ValueError's text is written for users; anything else also needs its type to make sense."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def spawn(config: EngineConfig, address_in: str, address_out: str) -> subprocess.Popen[bytes]:
    """Start the core as a child process in a session of its own, so that signals to our group don't reach it."""
    command = [sys.executable, "-m", "paceline_engine.core_process", address_in, address_out, str(os.getpid())]
    environment = {**os.environ, CONFIG_VARIABLE: msgspec.json.encode(config).decode()}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def main() -> int:
    """Entry of the child process. Exit codes: 0 done, 1 failed, 2 bad input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(sys.argv) != 4 or CONFIG_VARIABLE not in os.environ:
        logger.error("usage: %s=JSON python -m %s ADDRESS_IN ADDRESS_OUT PARENT_PID", CONFIG_VARIABLE, __spec__.name)
        return 2
    try:
        config = msgspec.json.decode(os.environ[CONFIG_VARIABLE], type=EngineConfig)
    except msgspec.DecodeError as error:
        logger.error("$%s: %s", CONFIG_VARIABLE, error)
        return 2
    return run(config, sys.argv[1], sys.argv[2], int(sys.argv[3]))


if __name__ == "__main__":
    sys.exit(main())
