"""The API process's side of the engine core: start it, talk to it, notice when it stalls or dies.

Every request submitted here ends exactly once, whatever happens to the core. A request that its consumer abandoned
stays counted until the core confirms its end, so the bound on live requests also bounds the message queues. One event
loop only; imports neither torch nor FastAPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from msgspec.structs import replace

from paceline_engine import core_process
from paceline_engine.config import EngineConfig
from paceline_engine.core_grammars import Constraint, CoreGrammars
from paceline_engine.messages import (
    AbortRequest,
    AddRequest,
    Command,
    CommandName,
    CommandResult,
    CoreFailed,
    CoreReady,
    CoreStats,
    FromCore,
    KVEvent,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToCore,
)

# Longest AF_UNIX path on Linux is 107 bytes; a long TMPDIR would break every start.
MAX_DIRECTORY_BYTES = 90
# What the core sent before it died is read for this long after its exit.
LAST_WORDS_SECONDS = 0.2
KILL_AFTER_SECONDS = 5.0
MAX_COMMANDS = 64

logger = logging.getLogger(__name__)


class CoreError(RuntimeError):
    """The core can't serve: one line that says why."""


class QueueFull(RuntimeError):
    """As many requests are live as this engine admits."""


class CoreProcess:
    """A running core and the private directory of its sockets. `kill` is safe to call twice."""

    def __init__(self, config: EngineConfig) -> None:
        directory = tempfile.mkdtemp(prefix="paceline-")
        if len(directory.encode()) > MAX_DIRECTORY_BYTES:
            Path(directory).rmdir()
            directory = tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
        self._directory = directory
        self.address_in, self.address_out = f"ipc://{directory}/in", f"ipc://{directory}/out"
        self.popen: subprocess.Popen[bytes] = core_process.spawn(config, self.address_in, self.address_out)

    def kill(self) -> None:
        """End the process now and remove its directory."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self.forget_paths()

    def forget_paths(self) -> None:
        """Remove the sockets' paths. Connected sockets don't need them, and nothing is left if we are killed later."""
        shutil.rmtree(self._directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One output of the core and when it reached this process, in the client's clock."""

    output: RequestOutput
    at: float


class RequestStream:
    """The outputs of one submitted request, in order, the last with a finish_reason."""

    def __init__(self, client: CoreClient, request_id: str) -> None:
        self._client = client
        self.request_id = request_id
        # Bounded by the request's max_tokens, which admission bounds by the model's length.
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self._ended = False

    def put(self, arrival: Arrival) -> None:
        """Called by the client only; outputs after the last are dropped."""
        if not self._ended:
            self._ended = arrival.output.finish_reason is not None
            self._queue.put_nowait(arrival)

    async def next(self) -> list[Arrival]:
        """All outputs there are, at least one."""
        arrivals = [await self._queue.get()]
        while not self._queue.empty():
            arrivals.append(self._queue.get_nowait())
        return arrivals

    def close(self) -> None:
        """Abandon the request: the core is told to end it unless it has ended."""
        if not self._ended:
            self._ended = True
            self._client.abort(self.request_id)


class CoreClient:
    """Submits requests to a core and hands their outputs out."""

    def __init__(
        self,
        process: CoreProcess,
        *,
        max_live: int,
        on_stats: Callable[[CoreStats], None],
        on_kv_events: Callable[[tuple[KVEvent, ...]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self.max_live = max_live
        self._on_stats = on_stats
        self._on_kv_events = on_kv_events
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._push, self._pull = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.set_hwm(0)  # bounded by max_live: at most an add and an abort for each live request
            socket.linger = 0
        self._push.bind(process.address_in)
        self._pull.bind(process.address_out)
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[CoreReady] = loop.create_future()
        self.dead: asyncio.Future[str] = loop.create_future()
        self._exited: asyncio.Future[int] = loop.create_future()
        self.stats = CoreStats()
        self.kv_store: dict[str, Any] | None = None
        self._last_heard = clock()
        self._commands: dict[str, asyncio.Future[CommandResult]] = {}
        self._command_ids = itertools.count()
        self.grammars = CoreGrammars(self._send, self._ask)
        self._grammar_of: dict[str, int] = {}
        self._stopping = False
        self._failure: str | None = None
        self._reader = loop.create_task(self._read())
        self._reaper = loop.create_task(self._reap())
        threading.Thread(target=self._wait, args=(loop,), name="core-wait", daemon=True).start()

    @property
    def num_live(self) -> int:
        """Requests that the core has not ended."""
        return len(self._streams)

    def room_for(self, count: int) -> bool:
        """Whether `count` more requests would be admitted."""
        return len(self._streams) + count <= self.max_live

    def silent_seconds(self) -> float:
        """Seconds since the core last said anything; a live core speaks about twice a second."""
        return self._clock() - self._last_heard

    def submit(self, request: AddRequest, constraint: Constraint | None = None) -> RequestStream:
        """Send a request, and say which grammar it follows. Raises CoreError if the core is not serving, QueueFull."""
        if self.dead.done() or not self.ready.done():
            raise CoreError("the engine core is not running")
        if not self.room_for(1):
            raise QueueFull(f"{len(self._streams)} requests are live")
        if constraint is not None:
            grammar_id = self._grammar_of[request.request_id] = self.grammars.hold(constraint)
            request = replace(request, grammar_id=grammar_id)
        stream = self._streams[request.request_id] = RequestStream(self, request.request_id)
        self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        """Tell the core to end a request; its blocks are free after the core's next step."""
        if request_id in self._streams:
            self._send(AbortRequest(request_id=request_id))

    def abort_all(self) -> None:
        """End every live request; consumers see the core's "abort"."""
        for request_id in list(self._streams):
            self._send(AbortRequest(request_id=request_id))

    async def command(self, name: CommandName, /, **arguments: str) -> dict[str, Any]:
        """Have the core do something between two steps; its answer. Raises CoreError if it can't, or is gone."""
        if self.dead.done() or not self.ready.done():
            raise CoreError("the engine core is not running")
        if len(self._commands) >= MAX_COMMANDS:
            raise CoreError(f"{len(self._commands)} commands wait for the engine core: try again later")
        result = await self._ask(lambda command_id: Command(command_id=command_id, name=name, arguments=arguments))
        if result.error is not None:
            raise CoreError(result.error)
        return result.values

    def _ask(self, make: Callable[[str], ToCore]) -> asyncio.Future[CommandResult]:
        """Send a message that is answered by its id; the answer to come."""
        command_id = str(next(self._command_ids))
        answer: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        if self.dead.done():
            answer.set_result(CommandResult(command_id=command_id, error=self.dead.result()))
            return answer
        self._commands[command_id] = answer
        answer.add_done_callback(lambda _: self._commands.pop(command_id, None))
        self._send(make(command_id))
        return answer

    async def stop(self, flush_s: float = 0.0) -> None:
        """Ask the core to leave, kill it if it doesn't, end what is live. flush_s: what its KV store may take."""
        self._stopping = True
        if not self._exited.done():
            self._send(Shutdown(flush_s=flush_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._exited), flush_s + KILL_AFTER_SECONDS)
        self.kill()
        await self._reaper
        self._reader.cancel()
        self._context.destroy(linger=0)

    def kill(self) -> None:
        """End the core now."""
        self._process.kill()

    def _send(self, message: ToCore) -> None:
        if not self.dead.done():
            self._push.send(self._encoder.encode(message))

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromCore)
        while True:
            message = decoder.decode(await self._pull.recv())
            self._last_heard = self._clock()
            match message:
                case StepOutputs():
                    self._dispatch(message)
                case CoreReady():
                    # Sent only once the core's inbox is connected, through its outbox: nobody needs the paths any more.
                    self._process.forget_paths()
                    if not self.ready.done():
                        self.ready.set_result(message)
                case CoreFailed():
                    self._failure = message.message

    def _dispatch(self, step: StepOutputs) -> None:
        self.stats = step.stats
        self.kv_store = step.kv_store or self.kv_store
        for output in step.outputs:
            done = output.finish_reason is not None
            stream = self._streams.pop(output.request_id, None) if done else self._streams.get(output.request_id)
            if done and output.request_id in self._grammar_of:
                self.grammars.release(self._grammar_of.pop(output.request_id))
            if stream is not None:
                stream.put(Arrival(output, self._last_heard))
        for result in step.results:
            self._answer(result)
        if step.kv_events:
            self._on_kv_events(step.kv_events)
        self._on_stats(step.stats)

    def _answer(self, result: CommandResult) -> None:
        answer = self._commands.get(result.command_id)
        if answer is not None and not answer.done():
            answer.set_result(result)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: the only portable wait for a child that no signal handler can disturb."""
        code = self._process.popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        if not self._exited.done():
            self._exited.set_result(code)

    async def _reap(self) -> None:
        """After the core's exit: hear its last words, then end every live request."""
        code = await self._exited
        await asyncio.sleep(LAST_WORDS_SECONDS)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        reason = self._failure or f"the engine core {how}"
        self.dead.set_result(reason)
        for request_id in list(self._streams):
            output = RequestOutput(request_id=request_id, finish_reason="error", error=reason)
            self._streams.pop(request_id).put(Arrival(output, self._clock()))
        for command_id in list(self._commands):
            self._answer(CommandResult(command_id=command_id, error=reason))
        if not self._stopping:
            logger.error("%s", reason)
