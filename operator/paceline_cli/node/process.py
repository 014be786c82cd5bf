"""One operating-system process of a pod: started in a session of its own, watched, ended as a whole group.

Why not asyncio's pipes: `wait()` there may wait for the pipes' end too, and a grandchild that keeps stdout open would
make an exited container look alive. A descendant that starts a session of its own leaves the group and must end
with its parent by its own means: without cgroups nothing holds it. Must not import the pod model.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline_cli.node.base import Command
from paceline_cli.node.guard import Guard

_LAUNCHER = Path(__file__).with_name("launcher.py")
_CHUNK = 65536
_DRAIN_S = 2.0
"""How long the output of an exited process may still arrive."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: 128 + signal number for a signal, as container runtimes report it."""

    code: int
    signal: int = 0


class Process:
    """Made by `start`. `ended` is a task whose result is the Exit; by then the whole group has been killed."""

    def __init__(self, inner: asyncio.subprocess.Process, command: Command, guard: Guard, output: "_Output") -> None:
        self._inner = inner
        self._command = command
        self._guard = guard
        self._output = output
        self.pid = inner.pid
        self.ended = asyncio.ensure_future(self._watch())

    @classmethod
    async def start(
        cls, command: Command, write: Callable[[bytes], None], guard: Guard, *, no_new_privileges: bool = False
    ) -> "Process":
        """Starts `command`; `write` receives stdout and stderr in order. Raises OSError if nothing can be started."""
        reader, writer = os.pipe()
        flags = "n" if no_new_privileges else "-"
        argv = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), flags, *command.argv]
        try:
            inner = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(command.env),
                cwd=command.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        guard.add(inner.pid)
        return cls(inner, command, guard, _Output(reader, write))

    @property
    def alive(self) -> bool:
        """False once the whole group is gone."""
        return not self.ended.done()

    def terminate(self) -> None:
        """SIGTERM, to the first process only unless the command says otherwise (as a container runtime does)."""
        with contextlib.suppress(ProcessLookupError):
            if self._command.signal_group:
                os.killpg(self.pid, signal.SIGTERM)
            else:
                self._inner.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to every process of the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _watch(self) -> Exit:
        code = await self._inner.wait()
        # A container ends with its first process: nothing of the group may stay.
        self.kill()
        await self._output.drain()
        self._guard.remove(self.pid)
        return Exit(128 - code, -code) if code < 0 else Exit(code)


class _Output:
    """Copies a pipe to `write` on the event loop."""

    def __init__(self, descriptor: int, write: Callable[[bytes], None]) -> None:
        self._descriptor = descriptor
        self._write = write
        self._ended = asyncio.Event()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._readable)

    def _readable(self) -> None:
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        if chunk:
            self._write(chunk)
        else:
            self._close()

    def _close(self) -> None:
        if not self._ended.is_set():
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._ended.set()

    async def drain(self) -> None:
        """Waits for the end of the output, but not for a stranger who still holds the pipe."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _DRAIN_S)
        self._close()


async def run_to_end(command: Command, guard: Guard, timeout_s: float, output_max: int = 4096) -> tuple[int, str]:
    """Runs a command to its end: (exit code, last bytes of output). Killed and TimeoutError after `timeout_s`."""
    tail = bytearray()

    def write(chunk: bytes) -> None:
        tail.extend(chunk)
        del tail[:-output_max]

    process = await Process.start(command, write, guard)
    try:
        ended = await asyncio.wait_for(asyncio.shield(process.ended), timeout_s)
    finally:
        process.kill()
    return ended.code, tail.decode(errors="replace")
