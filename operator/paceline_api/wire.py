"""Headers and payload shapes between processes, defined once and tested from both ends.

Every JSON payload carries `v`; a reader accepts the current and the previous version, so that a rolling upgrade never
stops traffic.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

LOAD_VERSION = 1
ACCEPTED_LOAD_VERSIONS = frozenset({LOAD_VERSION})

HEADER_REQUEST_ID = "x-request-id"
HEADER_TRACEPARENT = "traceparent"
HEADER_PREFIX_PRIVATE = "x-paceline-"
HEADER_SALT = "x-paceline-salt"
HEADER_TENANT = "x-paceline-tenant"
HEADER_DEADLINE_MS = "x-paceline-deadline-ms"
HEADER_PRIORITY = "x-paceline-priority"

BODY_BYTES_MAX = 32 * 1024 * 1024


class EngineLoad(BaseModel):
    """Answer of the engine's `GET /v1/load`: what was true at `time` (Unix seconds).

    free_blocks: held by nobody; cached_blocks of them hold KV that a prefix would find. A step of n tokens takes about
    step_alpha_s + step_beta_s * n; these and prefill_tokens_per_s are 0 until measured. epoch: of the KV events; a new
    one means that the cache began anew. config_hash: of the options that the engine runs with. kv_flush: of a drain,
    whether KV that only memory had is durable: "running" until then, or until that has "failed"; "done"; "" before it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: int = LOAD_VERSION
    time: float
    running: int
    waiting: int
    in_flight: int
    num_blocks: int
    free_blocks: int
    block_size: int
    namespace_digest: str
    draining: bool
    asleep: bool = False
    cached_blocks: int = 0
    max_model_len: int = 0
    tokenizer_digest: str = ""
    step_alpha_s: float = 0.0
    step_beta_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    epoch: str = ""
    config_hash: str = ""
    kv_flush: str = ""


class DrainRequest(BaseModel):
    """Body of the engine's `POST /admin/drain`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: int = 1
    deadline_s: float = 120.0


class DrainState(BaseModel):
    """Answer to a drain: how many accepted requests are still running."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: int = 1
    draining: bool
    in_flight: int
