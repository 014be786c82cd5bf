"""Messages between the API process and the engine core process (msgpack over ZMQ).

The core never sees text: prompts arrive as token ids, outputs leave as token ids. Both processes import this
module, so it must import neither torch nor FastAPI.
"""

from __future__ import annotations

from typing import Any, Literal

from paceline_engine.records import Struct


class SamplingParams(Struct, frozen=True, kw_only=True):
    """Per-request sampling, normalised once in the API process.

    temperature: 0 is greedy. top_k: 0 is off. top_p: in (0, 1]. min_p: in [0, 1]; 0 is off. Penalties as in OpenAI
    (presence, frequency: in [-2, 2], over output tokens) and Keskar et al., arXiv 1909.05858 (repetition: above 0, over
    prompt and output). logit_bias: (token id, added to its logit). allowed_token_ids: empty allows all. bad_words:
    sequences of ids that must not appear in the output. seed: drawn in the API process where the client named none, so
    the core never draws one. min_tokens: output tokens before which no token may end the output. logprobs: how many
    alternatives to report beside each output token; None reports nothing, 0 the token's own. prompt_logprobs: likewise
    for prompt tokens.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Handoff(Struct, frozen=True, kw_only=True):
    """KV of a prompt's leading chunks that the engine that computed it lends to the one that goes on with it.

    transfer_id: the lease. epoch: of the lender's KV; it changes with everything that makes what was lent before
    worthless. namespace: hex digest of what the KV is the state of. expires_at: Unix seconds.
    """

    transfer_id: str
    epoch: str
    namespace: str
    num_tokens: int
    num_chunks: int
    expires_at: float


class AddRequest(Struct, frozen=True, kw_only=True, tag="add"):
    """One accepted request.

    salt: isolates tenants' cached KV; part of the first block's hash. tenant: whose quota of stored KV it is. priority:
    lower runs first, as in vLLM. ttft_s, e2e_s: seconds from arrival by which the first and the last token must be out;
    None is no limit. adapter: name of a loaded LoRA adapter. grammar_id: of the LoadGrammar whose grammar the output
    follows. traffic_class: what speculation is switched by. embed: answer with the prompt's embedding, no tokens.
    lends: another engine goes on with it, so its prompt's KV is lent. handoff: KV of its prompt that another engine
    lends.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    adapter: str | None = None
    grammar_id: int | None = None
    traffic_class: str = ""
    embed: bool = False
    bundled: bool = False
    lends: bool = False
    handoff: Handoff | None = None


class AbortRequest(Struct, frozen=True, kw_only=True, tag="abort"):
    """The client went away or a stop string was found: end the request and free its blocks."""

    request_id: str


CommandName = Literal["reset_prefix_cache", "sleep", "wake", "load_adapter", "unload_adapter", "explain", "flush"]


class Command(Struct, frozen=True, kw_only=True, tag="command"):
    """Something to do between two steps that is no request. Answered by one CommandResult with the same id."""

    command_id: str
    name: CommandName
    arguments: dict[str, str] = {}


class PrepareGrammars(Struct, frozen=True, kw_only=True, tag="prepare_grammars"):
    """A grammar is being compiled: get ready for it, beside the steps. vocabulary: xgrammar's serialised form, once."""

    vocabulary: bytes = b""


class LoadGrammar(Struct, frozen=True, kw_only=True, tag="load_grammar"):
    """Load a compiled grammar (xgrammar's serialised form), beside the steps, for requests that will name it.

    Answered by one CommandResult with this command_id, whose values have its "bytes" in memory. Ids are used once.
    """

    command_id: str
    grammar_id: int
    grammar: bytes


class DropGrammar(Struct, frozen=True, kw_only=True, tag="drop_grammar"):
    """No request names this grammar any more."""

    grammar_id: int


class Shutdown(Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Leave the loop after the current step. flush_s: seconds that KV may take to reach the store."""

    flush_s: float = 0.0


class StoreNews(Struct, frozen=True, kw_only=True, tag="news"):
    """The KV store has brought something back. From the core's own threads to its loop, so that this wakes up."""


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural logarithm of a token's probability before temperature and cuts, and the likeliest alternatives.

    rank: 1 for the likeliest token. top: (token id, logprob), likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


# "invalid": no retry helps. "queue_full", "deadline", "asleep": this engine can't now, another may. "internal": the
# engine's own fault.
ErrorKind = Literal["invalid", "queue_full", "deadline", "asleep", "internal"]


class RequestOutput(Struct, frozen=True, kw_only=True):
    """What one step yields for one request.

    finish_reason is None while the request runs, then exactly once one of "stop", "length", "deadline", "abort",
    "error". error carries the message for "error" and "deadline", error_kind tells errors apart. A request refused on
    arrival ends with "error", also where its deadline could not be met; "deadline" cuts one that was accepted and then
    missed it. logprobs stand beside new_token_ids where they were asked for.
    prompt_logprobs come once, with the first token: one entry a prompt token, None for the first. num_cached_tokens:
    prompt tokens whose KV was found, not computed; loaded_tokens: those of them that were loaded for this request, by
    the KV store's tier. num_draft_tokens, num_accepted_tokens: guesses verified and kept in
    this step; rejected_token_ids: the first guess that was wrong and those behind it. embedding: where one was asked
    for, a unit vector as float32, little endian; comes with "stop". handoff: what is lent of a request with `lends`
    that ended with "length". ages: where several steps' outputs were joined, for each that had tokens the seconds since
    that step.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0
    loaded_tokens: dict[str, int] = {}
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    rejected_token_ids: tuple[int, ...] = ()
    embedding: bytes = b""
    ages: tuple[float, ...] = ()
    handoff: Handoff | None = None


class CoreStats(Struct, frozen=True, kw_only=True):
    """Scheduler state after a step. Counters only grow; *_seconds are seconds.

    num_free_blocks: held by nobody; num_cached_blocks of them hold KV that a prefix hit would find. prefix_query_tokens
    and prefix_hit_tokens: of admitted requests' prompts. kv_loaded_tokens: that the KV store brought back, by tier;
    kv_dropped_chunks: that it had no room for. spec_accepted_per_position: how often the first, second, ... guess was
    kept. num_deadline_refusals were refused on arrival, num_deadline_misses cut. waiting_reasons: waiting requests by
    what they wait for. A step of n tokens takes about step_alpha_seconds + step_beta_seconds * n;
    prefill_tokens_per_second is measured; all three are 0 until known. num_steps: round trips to the device, which took
    step_seconds. handoffs: how many, by "side outcome"; kv_leases: those that are open, by side. device: the backend's
    own counters.
    """

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
    kv_loaded_tokens: dict[str, int] = {}
    kv_dropped_chunks: int = 0
    num_cached_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_position: tuple[int, ...] = ()
    num_deadline_refusals: int = 0
    num_deadline_misses: int = 0
    num_queue_refusals: int = 0
    waiting_reasons: dict[str, int] = {}
    step_alpha_seconds: float = 0.0
    step_beta_seconds: float = 0.0
    prefill_tokens_per_second: float = 0.0
    asleep: bool = False
    handoffs: dict[str, int] = {}
    kv_leases: dict[str, int] = {}
    device: dict[str, float] = {}


class KVEvent(Struct, frozen=True, kw_only=True):
    """A change of what the prefix cache can find. Sequence numbers of one core are 0, 1, 2, ... without a gap.

    "stored": block_hashes are new, the first one's parent is parent_hash (None: a root), token_ids are all their
    tokens, or none where only hashes are known (warm-up). "removed": block_hashes can't be found any more. "cleared":
    nothing can.
    """

    sequence: int
    kind: Literal["stored", "removed", "cleared"]
    block_hashes: tuple[bytes, ...] = ()
    parent_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()


class CommandResult(Struct, frozen=True, kw_only=True, tag="result"):
    """A command's answer: values, or one line that says why it could not be done.

    Also how work beside the core's steps tells the core's own loop that it is done.
    """

    command_id: str
    values: dict[str, Any] = {}
    error: str | None = None


class StepOutputs(Struct, frozen=True, kw_only=True, tag="step"):
    """Outputs of one step, or of several that had none. Sent without outputs now and then (at least once a second).

    kv_store: the KV store's counts (`paceline_kvstore.metrics.StoreSnapshot`), about once a second if there is one.
    """

    outputs: tuple[RequestOutput, ...] = ()
    stats: CoreStats = CoreStats()
    kv_events: tuple[KVEvent, ...] = ()
    results: tuple[CommandResult, ...] = ()
    kv_store: dict[str, Any] | None = None


class CoreReady(Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded and the KV pool allocated.

    follows_constraints: the device can load grammars. lends: there is a tier of the KV store that other engines reach.
    gpus: CUDA's numbers of the GPUs it runs on; none if it has none.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    namespace_digest: str
    load_seconds: float
    follows_constraints: bool = True
    lends: bool = False
    gpus: tuple[int, ...] = ()


class CoreFailed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The core can't start or can't go on: one line that says what and what to do."""

    message: str


ToCore = (
    AddRequest
    | AbortRequest
    | Command
    | PrepareGrammars
    | LoadGrammar
    | DropGrammar
    | CommandResult
    | Shutdown
    | StoreNews
)
FromCore = StepOutputs | CoreReady | CoreFailed
