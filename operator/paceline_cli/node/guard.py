"""Kills the node's process groups when the node dies, however it dies.

The node holds the write end of this process's stdin and sends `+PGID` and `-PGID` lines; end of input means that the
node is gone, and every group still listed gets SIGKILL. Covers what PR_SET_PDEATHSIG does not: grandchildren, changed
credentials, systems other than Linux. Runs under `python -I -S`: standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys


def main() -> int:
    """Runs until end of input."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = line[1:].strip()
        if not number.isdigit():
            continue
        if line[0] == "+":
            groups.add(int(number))
        else:
            groups.discard(int(number))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    return 0


class Guard:
    """The node's end: starts the guard process on first use and again if somebody killed it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Kill `group` if this process dies."""
        self._groups.add(group)
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """`group` is gone."""
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard process; groups still listed are killed."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait(timeout=5)
        self._process = None

    def _send(self, line: str) -> None:
        try:
            self._write(line)
        except OSError:
            if self._process is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()  # type: ignore[union-attr]
                self._process.wait(timeout=5)
            self._process = None
            with contextlib.suppress(OSError):
                self._write("")

    def _write(self, line: str) -> None:
        if self._process is None:
            command = [sys.executable, "-I", "-S", __file__]
            # A session of its own: Ctrl-C in the terminal must not end it before the node.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
            line = "".join(f"+{group}\n" for group in self._groups)
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


if __name__ == "__main__":
    sys.exit(main())
