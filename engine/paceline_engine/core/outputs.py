"""What the scheduler asks of a device for one step, and what comes back.

Plain data: a plan names requests, tokens and block ids, so a device can live in another process or be a simulation.
Imports neither tensors nor I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.messages import Constraint, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """All that a device keeps of a request while it runs; told once when it begins to run, and anew after preemption.

    token_ids: prompt and the output known by now, the first num_prompt_tokens of them the prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    adapter: str | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step: compute KV of `token_ids`, which stand at `start`, `start` + 1, ...

    new_block_ids extend the request's block table. The last num_draft_tokens of token_ids are guesses. With sample, the
    logits of the last known token and of each guess yield tokens: each guess is kept while it agrees, then one token
    more is drawn. num_wanted_drafts: guesses that a drafting device should return for the next step.
    """

    request_id: str
    token_ids: list[int]
    start: int
    new_block_ids: list[int]
    sample: bool
    num_draft_tokens: int = 0
    num_wanted_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed for this request in this step, guesses included."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Length of the computed context after this step, guesses included."""
        return self.start + len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Length of the computed context after this step without guesses; the position of the first sampled token."""
        return self.start + len(self.token_ids) - self.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. A device applies `released`, then `admitted`, then computes `scheduled`.

    released: requests whose device-side rows can go: finished, aborted or preempted. admitted: requests that get a row
    with an empty block table; each is also scheduled.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    admitted: tuple[AdmittedRequest, ...] = ()
    released: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch; at most the token budget."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A device's answer for one request with `sample`: tokens, or one line that says why there are none.

    token_ids: the guesses that were kept, then one token more. logprobs stand beside them, prompt_logprobs beside the
    prompt tokens of this share that follow another token, where they were asked for. draft_token_ids: guesses for the
    next step, from a device that drafts.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
