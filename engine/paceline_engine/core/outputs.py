"""What the scheduler asks of a device for one step, and what comes back.

Plain data: a plan names requests, tokens and block ids, so a device can live in another process or be a simulation.
Imports neither tensors nor I/O.
"""

from __future__ import annotations

from paceline_engine.messages import ErrorKind, SamplingParams, TokenLogprobs
from paceline_engine.records import Struct

# A token that the device has sampled, or will before it comes to this plan, and the scheduler doesn't know.
UNKNOWN = -1

# Structs, not dataclasses: one of each is made for every running request in every step. They hold no cycles, so the
# garbage collector needn't visit them.


class AdmittedRequest(Struct, frozen=True, kw_only=True, gc=False):
    """All that a device keeps of a request while it runs; told once when it begins to run, and anew after preemption.

    token_ids: prompt and the output known by now, the first num_prompt_tokens of them the prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    adapter: str | None = None
    grammar_id: int | None = None


class ScheduledRequest(Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step: compute KV of `token_ids`, which stand at `start`, `start` + 1, ...

    new_block_ids extend the request's block table. The last num_draft_tokens of token_ids are guesses. With sample, the
    logits of the last known token and of each guess yield tokens: each guess is kept while it agrees, then one token
    more is drawn. num_wanted_drafts: guesses that a drafting device should return for the next step. num_steps: steps
    that the device may make in a row for this request, each computing the token that the one before sampled; its blocks
    are there. Above 1 only where one known token is computed and nobody guesses. In a plan that was made before the
    last one's results were known, a decode's token is UNKNOWN: the device takes its own latest. Of a row that has ended
    it may take any, since what that yields is not used. embed: the hidden state of the last token is wanted as the
    embedding of all tokens so far; never with sample.
    """

    request_id: str
    token_ids: list[int]
    start: int
    new_block_ids: list[int]
    sample: bool
    num_draft_tokens: int = 0
    num_wanted_drafts: int = 0
    num_steps: int = 1
    embed: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens computed for this request in the first step, guesses included."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Length of the computed context after this step, guesses included."""
        return self.start + len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Length of the computed context after this step without guesses; the position of the first sampled token."""
        return self.start + len(self.token_ids) - self.num_draft_tokens


class StepPlan(Struct, frozen=True, kw_only=True, gc=False):
    """One step. A device applies `released`, then `admitted`, then computes `scheduled`.

    released: requests whose device-side rows can go: finished, aborted or preempted. admitted: requests that get a row
    with an empty block table; each is also scheduled. num_decodes: how many of those that ran before compute one known
    token.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    admitted: tuple[AdmittedRequest, ...] = ()
    released: tuple[str, ...] = ()
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch of the first step; at most the token budget."""
        return sum([len(item.token_ids) for item in self.scheduled])


class StepResult(Struct, frozen=True, gc=False):
    """A device's answer for one request: tokens where it samples, or one line that says why there are none.

    token_ids: the guesses that were kept, then one token more; or one token of each step that was made. logprobs stand
    beside them, where they were asked for. error_kind: "invalid" where the request itself is to blame. prompt_logprobs:
    of the prompt tokens that this share's logits predict, positions start + 1 to `end`, so also for shares without
    `sample`. draft_token_ids: guesses for the next step, from a device that drafts or a grammar that leaves no choice.
    embedding: for a share with `embed`, as in `RequestOutput`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    embedding: bytes = b""
    error_kind: ErrorKind = "internal"
