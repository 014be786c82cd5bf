"""Messages between the API process and the engine core process (msgpack over ZMQ).

The core never sees text: prompts arrive as token ids, outputs leave as token ids. Both processes import this
module, so it must import neither torch nor FastAPI.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Per-request sampling, normalised once in the API process.

    temperature: 0 is greedy. top_k: 0 is off. top_p: in (0, 1]. seed: None draws one in the API process, so the
    core always receives an integer for sampled requests.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """One accepted request. `salt` isolates tenants' cached KV; it is part of the first block's hash."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The client went away or a stop string was found: end the request and free its blocks."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Leave the loop after the current step."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step yields for one request.

    finish_reason is None while the request runs, then exactly once one of "stop", "length", "abort", "error".
    error carries the message for "error".
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler state after a step. Counters only grow; *_seconds are seconds."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    step_seconds: float = 0.0
    kv_offloaded_sequences: int = 0
    kv_restored_sequences: int = 0
    kv_store_bytes: int = 0


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Outputs of one step. Sent without outputs as the heartbeat of an idle core (at least once a second)."""

    outputs: tuple[RequestOutput, ...] = ()
    stats: CoreStats = CoreStats()


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded and the KV pool allocated."""

    num_blocks: int
    block_size: int
    max_model_len: int
    namespace_digest: str
    load_seconds: float


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The core can't start or can't go on: one line that says what and what to do."""

    message: str


ToCore = AddRequest | AbortRequest | Shutdown
FromCore = StepOutputs | CoreReady | CoreFailed
