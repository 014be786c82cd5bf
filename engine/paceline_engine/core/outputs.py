"""What the scheduler asks of a device for one step, and what comes back.

Plain data: a plan names requests, tokens and block ids, so a device can live in another process or be a simulation.
Imports neither tensors nor I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.messages import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step: compute KV of `token_ids`, which stand at `start`, `start` + 1, ...

    new_block_ids extend the request's block table; with fresh_row the table starts anew with them. With sample, the
    logits of the last token yield the token at position `start + len(token_ids)`.
    """

    request_id: str
    token_ids: list[int]
    start: int
    new_block_ids: list[int]
    fresh_row: bool
    sample: bool
    sampling: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Tokens computed for this request in this step."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Length of the computed context after this step; the position of a sampled token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. `released` names requests whose device-side rows can go: finished, aborted or preempted."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    released: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch; at most the token budget."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A device's answer for one request with `sample`: a token, or one line that says why there's none."""

    request_id: str
    token_id: int = -1
    error: str | None = None
