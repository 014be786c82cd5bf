"""What a device's answer for one request means: which tokens are the request's, and what the client is told.

A device that answers nonsense fails the request it answered for, never the engine. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline_engine.core.outputs import ScheduledRequest, StepResult
from paceline_engine.core.request import Request
from paceline_engine.messages import RequestOutput, TokenLogprobs


def problem_with(item: ScheduledRequest, result: StepResult | None) -> str | None:
    """Why the answer for a share that samples can't be used, or None."""
    num_guesses = item.num_draft_tokens
    num_tokens = len(result.token_ids) if result is not None else 0
    if result is None or not 1 <= num_tokens <= num_guesses + item.num_steps:
        most = num_guesses + item.num_steps
        return f"the device returned {num_tokens} tokens for this request, not 1 to {most}"
    if num_guesses == 0:
        return None
    guesses = item.token_ids[len(item.token_ids) - num_guesses :]
    if num_tokens > 1 and list(result.token_ids[:-1]) != guesses[: num_tokens - 1]:
        return "the device kept guesses that were not made"
    return None


def embedding_of(request: Request, embedding: bytes, error: str | None) -> RequestOutput:
    """The one output of a request for an embedding; `error`: its deadline was missed just now."""
    return RequestOutput(
        request_id=request.request_id,
        finish_reason="deadline" if error is not None else "stop",
        error=error,
        error_kind="deadline" if error is not None else None,
        embedding=embedding if error is None else b"",
        num_cached_tokens=request.num_cached_tokens,
        loaded_tokens=request.loaded_tokens,
    )


def take_prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    """The request's prompt logprobs, which are told once, with the first token; None if some are missing."""
    if len(request.prompt_logprobs) != request.num_prompt_tokens - 1:
        return None
    told = (None, *request.prompt_logprobs)
    request.wants_prompt_logprobs = False
    request.prompt_logprobs = []
    return told


def output_of(
    request: Request,
    result: StepResult,
    num_taken: int,
    reason: str | None,
    error: str | None,
    guesses: Sequence[int],
    num_kept: int,
    prompt_logprobs: tuple[TokenLogprobs | None, ...],
) -> RequestOutput:
    """The first `num_taken` of the answer's tokens, as the client hears of them.

    Of `guesses` the first `num_kept` count as kept. The next one was wrong if another token came in its place; else it
    ended the output itself, or stood behind its end.
    """
    if reason is None and not guesses and not prompt_logprobs:
        # The usual case, made short: there is one for each running request in each step.
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=result.token_ids,
            logprobs=result.logprobs,
            num_cached_tokens=request.num_cached_tokens,
            loaded_tokens=request.loaded_tokens,
        )
    was_wrong = num_kept < min(num_taken, len(guesses)) and result.token_ids[num_kept] != guesses[num_kept]
    return RequestOutput(
        request_id=request.request_id,
        new_token_ids=result.token_ids[:num_taken],
        finish_reason=reason,
        error=error,
        error_kind="deadline" if error is not None else None,
        logprobs=result.logprobs[:num_taken],
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens,
        loaded_tokens=request.loaded_tokens,
        num_draft_tokens=len(guesses),
        num_accepted_tokens=num_kept,
        rejected_token_ids=tuple(guesses[num_kept:]) if was_wrong else (),
    )
