"""The router process's knobs, each with its unit, and the bounds that are not knobs."""

from __future__ import annotations

from dataclasses import dataclass

ATTEMPTS_MAX = 3
# A whole answer is held before it is passed on, so that an engine that dies half way costs a clean error.
WHOLE_ANSWER_BYTES_MAX = 64 * 1024 * 1024
# Read past the limit and dropped, so that a client that sends first and reads later sees the 413.
EXCESS_BODY_BYTES_MAX = 64 * 1024 * 1024
UPSTREAM_ERROR_BYTES_MAX = 64 * 1024
# Below uvicorn's 5 s at the engine: we let go of an idle connection before the engine does.
UPSTREAM_KEEPALIVE_S = 3.0
MODELS_NAMED_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the proxy. Times in seconds."""

    max_requests: int = 4096
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 600.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    drain_timeout_s: float = 120.0
