"""Grammars for requests: from the cache, or compiled by the worker process within a time limit.

The worker starts with the first constraint, is ended when it takes too long and started again when it is needed, and
leaves when it had nothing to do for a while. Requests for the same grammar share one compilation. Waiting compilations
and the bytes of the cache are bounded. One event loop only; imports neither torch nor xgrammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from paceline_engine.core_grammars import Constraint
from paceline_engine.structured.source import GrammarSource
from paceline_engine.structured.worker import LENGTH_BYTES, Compiled, Setup, frame

START_SECONDS = 120.0
IDLE_SECONDS = 600.0
MAX_WAITING = 64
MAX_CACHE_BYTES = 128 * 2**20
MAX_ANSWER_BYTES = 256 * 2**20
COMMAND = (sys.executable, "-m", "paceline_engine.structured.worker")

logger = logging.getLogger(__name__)


class CompileRefused(ValueError):
    """The source can't be compiled; the text says why."""


class CompilerBusy(RuntimeError):
    """As many compilations wait as are admitted."""


class CompilerFailed(RuntimeError):
    """The worker can't be started; the text says why."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary.

    on_vocabulary: called with nothing when the worker is started, for whoever will load grammars to begin as well, and
    with the serialised vocabulary when there is one.
    """

    def __init__(
        self,
        setup: Setup,
        tokenizer_digest: str,
        *,
        time_limit: float,
        command: tuple[str, ...] = COMMAND,
        start_limit: float = START_SECONDS,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        max_waiting: int = MAX_WAITING,
        on_vocabulary: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._setup = setup
        self._digest = tokenizer_digest
        self._time_limit = time_limit
        self._command = command
        self._start_limit = start_limit
        self._max_cache_bytes = max_cache_bytes
        self._max_waiting = max_waiting
        self._on_vocabulary = on_vocabulary
        self._cache: OrderedDict[str, Constraint] = OrderedDict()
        self._cache_bytes = 0
        self._running: dict[str, asyncio.Task[Constraint]] = {}
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self.num_compiled = 0
        """Grammars compiled so far; the others came from the cache."""

    async def compile(self, source: GrammarSource) -> Constraint:
        """The source's compiled grammar. Raises CompileRefused, CompilerBusy or CompilerFailed."""
        key = source.key(self._digest)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= self._max_waiting:
                raise CompilerBusy(f"{len(self._running)} grammars wait to be compiled")
            task = self._running[key] = asyncio.create_task(self._compile(key, source))
            task.add_done_callback(lambda done: self._forget(key, done))
        # A client that goes away must not end what others wait for.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the worker and what waits for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._idle is not None:
            self._idle.cancel()
        await self._end_worker()

    def _forget(self, key: str, done: asyncio.Task[Constraint]) -> None:
        self._running.pop(key, None)
        if not done.cancelled():
            done.exception()  # seen here, whether or not anybody still waits

    async def _compile(self, key: str, source: GrammarSource) -> Constraint:
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                answer = await self._ask(source)
            finally:
                self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._kill)
        if answer.error is not None:
            raise CompileRefused(answer.error)
        self.num_compiled += 1
        constraint = Constraint(key=key, grammar=answer.grammar)
        self._remember(constraint)
        return constraint

    def _remember(self, constraint: Constraint) -> None:
        self._cache[constraint.key] = constraint
        self._cache_bytes += len(constraint.grammar)
        while self._cache_bytes > self._max_cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= len(oldest.grammar)

    async def _ask(self, source: GrammarSource) -> Compiled:
        process = await self._worker()
        try:
            async with asyncio.timeout(self._time_limit):
                return await _exchange(process, source)
        except TimeoutError:
            await self._end_worker()
            raise CompileRefused(f"it takes longer than {self._time_limit:g} s to compile: make it simpler") from None
        except (asyncio.IncompleteReadError, OSError):
            await self._end_worker()
            raise CompileRefused("the compiler broke down over it: make it simpler") from None
        except BaseException:
            self._kill()
            raise

    async def _worker(self) -> asyncio.subprocess.Process:
        """The running worker, started if need be."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._on_vocabulary(b"")
        try:
            async with asyncio.timeout(self._start_limit):
                self._on_vocabulary((await _exchange(process, self._setup)).grammar)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            await self._end_worker()
            logger.error("the grammar compiler does not start: %s", error)
            raise CompilerFailed("the grammar compiler does not start: see the engine's log") from error
        except BaseException:
            self._kill()
            raise
        return process

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _end_worker(self) -> None:
        self._kill()
        if self._process is not None:
            await self._process.wait()
            self._process = None


async def _exchange(process: asyncio.subprocess.Process, message: msgspec.Struct) -> Compiled:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame(message))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
    if size > MAX_ANSWER_BYTES:
        raise OSError(f"an answer of {size} bytes")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Compiled)
