"""Starts a container's process: `launcher.py PARENT_PID FLAGS ARGV...`; replaced by ARGV with exec.

Why a program of its own: code between fork and exec (preexec_fn) is unsafe in a process with threads. On Linux the
kernel kills the process when its parent dies (PR_SET_PDEATHSIG); that setting survives exec but not a change of
credentials, for which `guard.py` is there. Runs under `python -I -S`: standard library only.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = 9


def main(argv: list[str]) -> int:
    """Returns only when ARGV could not be started: 127 not found, 126 not allowed."""
    parent, flags, command = int(argv[0]), argv[1], argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        # The parent may have died before the line above took effect.
        if os.getppid() != parent:
            return 1
        if "n" in flags:
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
