"""One request's life inside the core: tokens, computed length, block table, state.

States: WAITING -> RUNNING -> FINISHED, with RUNNING -> PREEMPTED -> RUNNING any number of times. FINISHED is entered
once, by `Scheduler`, together with the request's only terminal output. What the scheduler asks of a request in every
step is worked out here once, on arrival. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline_engine.core.ngram import NgramIndex
from paceline_engine.core.outputs import UNKNOWN, AdmittedRequest
from paceline_engine.messages import AddRequest, SamplingParams, TokenLogprobs


class RequestStatus(StrEnum):
    """Where a request is. WAITING and PREEMPTED requests hold no blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request and its progress.

    token_ids is prompt followed by output; the last may be UNKNOWN while a step is planned ahead. num_computed_tokens
    counts the leading tokens whose KV is in the blocks of block_ids; the scheduler's whole work is to raise it to
    len(token_ids), which max_total_tokens bounds. arrival numbers requests in the order in which they came. stop_ids:
    tokens that end the output, once first_stoppable tokens are there. block_hashes: identities of leading full blocks,
    made once and kept over preemption; num_published_blocks of them can be found by other requests. Deadlines are in
    the caller's clock. may_load: what the KV store has of it isn't known yet; load_until: how long it waits for that,
    once it does. loaded_tokens: what was loaded for it, by tier, from load_start on, as far as it is among the
    num_cached_tokens that it found when it was first admitted. num_offered_chunks: what the store was offered or has.
    embeds: ends with an embedding when its prompt is computed, without output tokens. lends: another engine goes on
    with it once it has ended.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_total_tokens: int
    stop_ids: frozenset[int] = frozenset()
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    adapter: str | None = None
    adapter_digest: str = ""
    grammar_id: int | None = None
    traffic_class: str = ""
    arrival: int = 0
    arrived_at: float = 0.0
    ttft_deadline: float | None = None
    e2e_deadline: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list[int])
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_published_blocks: int = 0
    may_publish: bool = True
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_offloaded_tokens: int = 0
    num_offered_chunks: int = 0
    may_load: bool = True
    load_until: float | None = None
    load_start: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict[str, int])
    draft_token_ids: Sequence[int] = ()
    ngrams: NgramIndex | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    wants_prompt_logprobs: bool = False
    embeds: bool = False
    lends: bool = False

    @classmethod
    def from_message(
        cls,
        message: AddRequest,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        adapter_digest: str = "",
        arrival: int = 0,
        now: float = 0.0,
    ) -> Request:
        """A WAITING request with the prompt as its tokens."""
        sampling = message.sampling
        num_prompt_tokens = len(message.prompt_token_ids)
        return cls(
            request_id=message.request_id,
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            # An embedding has no output, so its prompt may be as long as the model takes.
            max_total_tokens=num_prompt_tokens + 1
            if message.embed
            else min(num_prompt_tokens + sampling.max_tokens, max_model_len),
            stop_ids=frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))),
            salt=message.salt,
            tenant=message.tenant,
            priority=message.priority,
            adapter=message.adapter,
            adapter_digest=adapter_digest,
            grammar_id=message.grammar_id,
            traffic_class=message.traffic_class,
            arrival=arrival,
            arrived_at=now,
            ttft_deadline=None if message.ttft_s is None else now + message.ttft_s,
            e2e_deadline=None if message.e2e_s is None else now + message.e2e_s,
            wants_prompt_logprobs=sampling.prompt_logprobs is not None,
            embeds=message.embed,
            lends=message.lends,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled and known so far; they survive preemption."""
        return len(self.token_ids) - self.num_prompt_tokens - (self.token_ids[-1] == UNKNOWN)

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is being computed: until its first token is known, or once more after a preemption."""
        return self.num_computed_tokens < self.num_prompt_tokens or self.num_output_tokens == 0

    @property
    def num_pending_tokens(self) -> int:
        """The gap that the scheduler closes. At least 1 while the request is unfinished."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV this request can ever need: the last sampled token's KV is never computed."""
        return self.max_total_tokens - 1

    def accept(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Append tokens up to and with the first that ends the output; how many, and why it ended ("stop", "length").

        A stop token is part of the output, as its last token. It ends nothing before min_tokens others are there.
        """
        known, stop_ids = self.token_ids, self.stop_ids
        first_stoppable = self.num_prompt_tokens + self.sampling.min_tokens
        for index, token_id in enumerate(token_ids):
            known.append(token_id)
            if token_id in stop_ids and len(known) > first_stoppable:
                return index + 1, "stop"
            if len(known) >= self.max_total_tokens:
                return index + 1, "length"
        return len(token_ids), None

    def admitted(self) -> AdmittedRequest:
        """What a device is told when the request begins to run, or runs again."""
        return AdmittedRequest(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            adapter=self.adapter,
            grammar_id=self.grammar_id,
        )
