"""How long to wait: what is left until a moment on time.monotonic()."""

from __future__ import annotations

import threading
import time


def left(until: float) -> float:
    """Seconds until then for a wait: never negative, never more than a lock can wait."""
    return min(max(until - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
