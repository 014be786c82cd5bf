"""A process that ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

PARENT_CHECK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """End this process when `parent_pid` is no longer its parent, whatever the main thread is doing then.

    A thread asks twice a second. On Linux the kernel also signals at once; it does so when the parent *thread* that
    started us ends, so the signal is only a reason to look.
    """

    def exit_if_orphaned(_signal: int = 0, _frame: FrameType | None = None) -> None:
        if os.getppid() != parent_pid:
            os._exit(1)

    def watch() -> None:
        while True:
            exit_if_orphaned()
            time.sleep(PARENT_CHECK_SECONDS)

    if sys.platform == "linux":
        signal.signal(signal.SIGUSR2, exit_if_orphaned)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
