"""One prompt's way through the core: submit, detokenise, stop, time, and end with exactly one regular end or ApiError.

No HTTP types here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

from paceline_engine.core_client import Arrival, CoreError, QueueFull, RequestStream
from paceline_engine.detokenizer import OutputText
from paceline_engine.messages import AddRequest, Handoff, RequestOutput, SamplingParams, TokenLogprobs
from paceline_engine.server.constraints import Compiled
from paceline_engine.server.engine import Engine
from paceline_engine.server.errors import (
    RETRY_SOON_SECONDS,
    ApiError,
    deadline_exceeded,
    internal,
    invalid,
    unavailable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One choice to generate. Times are in the engine's clock; `*_at` are deadlines, None is no limit.

    request_id: of the HTTP request. number: of the prompt in it; the choices of one prompt share it. echo: the prompt's
    text is part of the answer. prompt_only: nothing is generated, one token is thrown away. hidden: ids without text;
    None hides the special tokens. embed: an embedding is wanted, and nothing is generated. streamed: deltas are wanted
    as they come; else the whole is. lends: another engine goes on after the first token. handoff: KV of the prompt that
    another engine lends.
    """

    token_ids: list[int]
    sampling: SamplingParams
    arrived: float
    request_id: str = ""
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    hidden: frozenset[int] | None = None
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    ttft_at: float | None = None
    e2e_at: float | None = None
    constraint: Compiled | None = None
    adapter: str | None = None
    number: int = 0
    echo: str | None = None
    prompt_only: bool = False
    with_kinds: bool = False
    traffic_class: str = ""
    embed: bool = False
    lends: bool = False
    handoff: Handoff | None = None
    streamed: bool = True

    @property
    def may_be_bundled(self) -> bool:
        """Whether tokens may come many at once: a stop string must be seen at once, and kinds are told by the step."""
        return not (self.streamed or self.stops or self.with_kinds)


@dataclass(slots=True)
class Counts:
    """Tokens of one choice. output counts the one that ended it; loaded: of the cached ones, by the KV store's tier."""

    output: int = 0
    cached: int = 0
    accepted: int = 0
    rejected: int = 0
    loaded: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class TokenKind:
    """How a token came about.

    "plain": no guess was there. "accepted": it was guessed. "replacement": a guess was wrong; rejected_ids are that
    guess and those behind it. "bonus": all guesses were right, and this one came on top.
    """

    token_id: int
    kind: Literal["plain", "accepted", "replacement", "bonus"]
    rejected_ids: tuple[int, ...] = ()


def token_kind(output: RequestOutput, position: int) -> TokenKind:
    """Of one token of one step's output."""
    token_id = output.new_token_ids[position]
    if output.num_draft_tokens == 0:
        return TokenKind(token_id, "plain")
    rejected = output.rejected_token_ids
    if rejected:
        accepted = position < output.num_accepted_tokens
        return TokenKind(token_id, "accepted") if accepted else TokenKind(token_id, "replacement", rejected)
    # Without a wrong guess every token with a guess beside it is that guess.
    return TokenKind(token_id, "accepted" if position < output.num_draft_tokens else "bonus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What became certain: text, one entry of logprobs for each new token, and at the end why ("stop" or "length").

    prompt_logprobs: one entry a prompt token, with the first delta. incomplete: the answer was cut before its
    constraint was fulfilled; None where there is none. handoff: at the end, what is lent.
    """

    index: int
    counts: Counts
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    kinds: tuple[TokenKind, ...] = ()
    finish_reason: str | None = None
    incomplete: bool | None = None
    handoff: Handoff | None = None


@dataclass(slots=True)
class _Run:
    """One running prompt."""

    prompt: Prompt
    output: OutputText
    counts: Counts = field(default_factory=Counts)
    first: float | None = None
    last: float = 0.0
    text: list[str] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    reason: str = "abort"

    def __post_init__(self) -> None:
        self.last = self.prompt.arrived


async def generate(engine: Engine, index: int, prompt: Prompt) -> AsyncGenerator[Delta, None]:
    """Run one prompt; the last delta has a finish_reason. Close the iterator to abort.

    Raises ApiError if the request ends without a regular reason: the core failed, a deadline passed, or the engine was
    stopped.
    """
    stream = submit(engine, prompt)
    output = OutputText(
        engine.serving.tokenizer,
        prompt.stops,
        min_tokens=prompt.sampling.min_tokens,
        keep_stop=prompt.keep_stop,
        hidden=prompt.hidden,
    )
    run = _Run(prompt, output)
    try:
        while True:
            delta = _advance(engine, run, index, await stream.next())
            if delta is not None:
                yield delta
                if delta.finish_reason is not None:
                    return
    finally:
        stream.close()
        decode_seconds = run.last - run.first if run.first is not None else 0.0
        engine.metrics.on_finished(run.reason, engine.clock() - prompt.arrived, run.counts.output, decode_seconds)


def submit(engine: Engine, prompt: Prompt) -> RequestStream:
    """Hand a prompt to the core. Raises ApiError if it takes none now. The caller closes the stream."""
    now = engine.clock()
    if any(at is not None and at <= now for at in (prompt.ttft_at, prompt.e2e_at)):
        engine.metrics.on_rejected("deadline")
        raise deadline_exceeded("the deadline passed before the request could begin")
    request = AddRequest(
        # A client may use an id twice, the core may not; `paceline explain request` looks for what is before the slash.
        request_id=f"{prompt.request_id}/{uuid.uuid4().hex[:16]}",
        prompt_token_ids=tuple(prompt.token_ids),
        sampling=prompt.sampling,
        salt=prompt.salt,
        tenant=prompt.tenant,
        priority=prompt.priority,
        ttft_s=None if prompt.ttft_at is None else prompt.ttft_at - now,
        e2e_s=None if prompt.e2e_at is None else prompt.e2e_at - now,
        adapter=prompt.adapter,
        traffic_class=prompt.traffic_class,
        embed=prompt.embed,
        bundled=prompt.may_be_bundled,
        lends=prompt.lends,
        handoff=prompt.handoff,
    )
    try:
        constraint = None if prompt.constraint is None else prompt.constraint.constraint
        stream = engine.serving.core.submit(request, constraint)
    except QueueFull as error:
        engine.metrics.on_rejected("queue_full")
        raise unavailable("the queue of this engine is full", "queue_full", RETRY_SOON_SECONDS) from error
    except CoreError as error:
        raise internal(str(error)) from error
    engine.metrics.on_accepted(len(prompt.token_ids))
    return stream


def _advance(engine: Engine, run: _Run, index: int, arrivals: list[Arrival]) -> Delta | None:
    """The delta of what arrived; None if nothing of it can be sent yet."""
    run.kinds = []
    text = run.prompt.echo or "" if run.first is None else ""
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    ended: str | None = None
    handoff: Handoff | None = None
    for arrival in arrivals:
        text += _take(engine, run, arrival, logprobs)
        prompt_logprobs = prompt_logprobs or arrival.output.prompt_logprobs
        handoff = arrival.output.handoff
        ended = "stop" if run.output.stopped else arrival.output.finish_reason
        if ended is not None:
            run.reason = ended
            raise_unless_regular(engine, arrival.output, ended)
            text += "" if run.prompt.prompt_only else run.output.flush()
            run.reason = ended = "stop" if run.output.stopped else ended
            break
    if run.prompt.constraint is not None:
        run.text.append(text)
    if ended is None and not (text or logprobs or prompt_logprobs or run.kinds):
        return None
    return Delta(
        index=index,
        counts=run.counts,
        text=text,
        logprobs=tuple(logprobs),
        prompt_logprobs=prompt_logprobs,
        kinds=tuple(run.kinds),
        finish_reason=ended,
        incomplete=None if ended is None else _is_incomplete(run),
        handoff=handoff if ended == "length" else None,
    )


def _take(engine: Engine, run: _Run, arrival: Arrival, logprobs: list[TokenLogprobs]) -> str:
    """Text of one output of the core; stops at a stop string, so tokens behind it count nowhere."""
    output, prompt = arrival.output, run.prompt
    run.counts.cached = max(run.counts.cached, output.num_cached_tokens)
    run.counts.loaded = run.counts.loaded or output.loaded_tokens
    run.counts.accepted += output.num_accepted_tokens
    run.counts.rejected += output.num_draft_tokens - output.num_accepted_tokens
    text, before = "", run.output.num_tokens
    for position, token_id in enumerate(output.new_token_ids if not prompt.prompt_only else ()):
        is_last = output.finish_reason == "stop" and position == len(output.new_token_ids) - 1
        text += run.output.push(token_id, silent=is_last and not _shows_stop(engine, prompt, token_id))
        if prompt.with_kinds:
            run.kinds.append(token_kind(output, position))
        if prompt.sampling.logprobs is not None and position < len(output.logprobs):
            logprobs.append(output.logprobs[position])
        if run.output.stopped:
            break
    run.counts.output = run.output.num_tokens
    if output.new_token_ids:
        engine.metrics.on_tokens(run.output.num_tokens - before)
        for age in output.ages or (0.0,):
            _time(engine, run, arrival.at - age)
    return text


def _time(engine: Engine, run: _Run, at: float) -> None:
    """A step yielded tokens at that time."""
    if run.first is None:
        run.first = at
        engine.metrics.on_first_token(at - run.prompt.arrived)
    else:
        engine.metrics.on_next_token(at - run.last)
    run.last = at


def _shows_stop(engine: Engine, prompt: Prompt, token_id: int) -> bool:
    """Whether the token that ended the output is part of its text: a stop token that was asked for, and to be kept."""
    return prompt.keep_stop and token_id not in engine.serving.model.config.eos_token_ids


def _is_incomplete(run: _Run) -> bool | None:
    """Whether the text ended before its constraint allowed it to; None without a constraint."""
    constraint = run.prompt.constraint
    if constraint is None:
        return None
    if not constraint.is_json:
        return run.reason == "length" or run.output.stopped
    try:
        json.loads("".join(run.text))
    except (ValueError, RecursionError):
        return True
    return False


def raise_unless_regular(engine: Engine, output: RequestOutput, reason: str) -> None:
    """Raises the ApiError of an end that is neither "stop" nor "length"."""
    if reason in ("stop", "length"):
        return
    if reason == "abort":
        raise unavailable("the engine was stopped before the answer was complete", "aborted")
    message = output.error or "the engine core failed"
    if reason == "deadline" or output.error_kind == "deadline":
        engine.metrics.on_rejected("deadline")
        raise deadline_exceeded(output.error or "the deadline passed before the answer was complete")
    raise {
        "invalid": lambda: invalid(message, code="invalid_value"),
        "queue_full": lambda: unavailable(message, "queue_full", RETRY_SOON_SECONDS),
        "asleep": lambda: unavailable(message, "asleep"),
    }.get(output.error_kind or "", lambda: _internal(message))()


def _internal(message: str) -> ApiError:
    return internal(message)
