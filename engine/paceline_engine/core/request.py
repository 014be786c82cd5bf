"""One request's life inside the core: tokens, computed length, block table, state.

States: WAITING -> RUNNING -> FINISHED, with RUNNING -> PREEMPTED -> RUNNING any number of times. FINISHED is entered
once, by `Scheduler`, together with the request's only terminal output. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paceline_engine.messages import AddRequest, SamplingParams


class RequestStatus(StrEnum):
    """Where a request is. WAITING and PREEMPTED requests hold no blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress.

    token_ids is prompt followed by output. num_computed_tokens counts the leading tokens whose KV is in the blocks of
    block_ids; the scheduler's whole work is to raise it to len(token_ids).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    salt: str = ""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list[int])
    num_preemptions: int = 0
    num_offloaded_tokens: int = 0

    @classmethod
    def from_message(cls, message: AddRequest) -> Request:
        """A WAITING request with the prompt as its tokens."""
        return cls(
            request_id=message.request_id,
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            sampling=message.sampling,
            salt=message.salt,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far; they survive preemption."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """The gap that the scheduler closes. At least 1 while the request is unfinished."""
        return len(self.token_ids) - self.num_computed_tokens

    def max_kv_tokens(self, max_model_len: int) -> int:
        """Most tokens whose KV this request can ever need: the last sampled token's KV is never computed."""
        return min(self.num_prompt_tokens + self.sampling.max_tokens, max_model_len) - 1
