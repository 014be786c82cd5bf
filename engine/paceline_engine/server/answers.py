"""OpenAI response payloads: chat and completion objects, whole or as stream chunks, and usage.

A whole answer is made of the same deltas as a stream and read by the same tool parser, so both say the same.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline_engine.messages import Handoff, TokenLogprobs
from paceline_engine.server.errors import ApiError
from paceline_engine.server.generation import Counts, Delta, Prompt, TokenKind
from paceline_engine.server.kv_transfer import transfer_params
from paceline_engine.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from paceline_engine.tokenizer import Tokenizer
from paceline_engine.tools.events import CallArguments, CallBegin, Content, Event, ToolParser

DONE = b"data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the status line is out."""
    return event(error.body())


def usage(prompts: Sequence[Prompt], counts: Sequence[Counts]) -> dict[str, Any]:
    """Token counts. A prompt counts once, whatever n; output includes the token that ended it.

    cached_tokens: of a prompt's first choice, for the others find what that one computed. cached_tokens_by_tier: where
    they were, if some were brought back from the KV store.
    """
    firsts = {prompt.number: index for index, prompt in reversed(list(enumerate(prompts)))}
    num_prompt = sum(len(prompts[index].token_ids) for index in firsts.values())
    num_output = sum(count.output for count in counts)
    cached = [(counts[index].cached, counts[index].loaded) for index in firsts.values()]
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": cached_details(cached),
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(count.accepted for count in counts),
            "rejected_prediction_tokens": sum(count.rejected for count in counts),
        },
    }


def cached_details(cached: Iterable[tuple[int, Mapping[str, int]]]) -> dict[str, Any]:
    """prompt_tokens_details of prompts with so many cached tokens, of which those were loaded, by tier."""
    num_cached, by_tier = 0, Counter[str]()
    for count, loaded in cached:
        num_cached += count
        by_tier.update(loaded)
    if not by_tier:
        return {"cached_tokens": num_cached}
    on_device = num_cached - by_tier.total()
    return {"cached_tokens": num_cached, "cached_tokens_by_tier": {"device": on_device} | by_tier}


@dataclass(slots=True)
class Choice:
    """One choice while its deltas come in."""

    prompt: Prompt
    parser: ToolParser | None
    completion_logprobs: CompletionLogprobs
    one_call: bool = False
    counts: Counts = field(default_factory=Counts)
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    kinds: list[TokenKind] = field(default_factory=list)
    started: bool = False
    finish_reason: str | None = None
    incomplete: bool | None = None
    handoff: Handoff | None = None

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """What a chat stream's chunks say of this delta: parts of a message."""
        self.counts = delta.counts
        self.logprobs += delta.logprobs
        self.kinds += delta.kinds
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.incomplete = delta.incomplete
        self.handoff = delta.handoff
        events: list[Event] = [Content(delta.text)] if self.parser is None else self.parser.push(delta.text)
        if self.parser is not None and delta.finish_reason is not None:
            events += self.parser.finish()
        parts = [part for found in events if (part := self._part(found)) is not None]
        if delta.finish_reason is not None:
            can_call = delta.finish_reason == "stop" and bool(self.calls) and _is_whole(self.calls[-1])
            self.finish_reason = "tool_calls" if can_call else delta.finish_reason
        return parts

    @property
    def text_or_none(self) -> str | None:
        """The message's content: null beside calls, where there is no text."""
        return self.text or (None if self.calls else "")

    def _part(self, found: Event) -> dict[str, Any] | None:
        if isinstance(found, Content):
            self.text += found.text
            return {"content": found.text}
        if self.one_call and found.index > 0:
            return None
        if isinstance(found, CallBegin):
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            function = {"name": found.name, "arguments": ""}
            self.calls.append(call | {"function": function})
            return {"tool_calls": [{"index": found.index} | call | {"function": dict(function)}]}
        assert isinstance(found, CallArguments)
        self.calls[found.index]["function"]["arguments"] += found.text
        return {"tool_calls": [{"index": found.index, "function": {"arguments": found.text}}]}


@dataclass(frozen=True, slots=True)
class Answer:
    """Builds the payloads of one response. `chat` picks the object's shape."""

    id: str
    model: str
    created: int
    chat: bool
    tokenizer: Tokenizer
    choices: list[Choice]

    def chunks(self, delta: Delta, usage_of: Callable[[], dict[str, Any] | None] | None) -> list[dict[str, Any]]:
        """Stream chunks of a delta. usage_of: what `usage` says in each; without it there is none."""
        choice = self.choices[delta.index]
        parts = choice.take(delta)
        bodies = self._chat_bodies(choice, parts) if self.chat else [{"text": delta.text}]
        if choice.finish_reason is None and not delta.logprobs and not delta.kinds:
            # A tool parser may hold everything back.
            bodies = [body for body in bodies if body != {"delta": {}}]
        made: list[dict[str, Any]] = []
        for number, body in enumerate(bodies):
            last = number == len(bodies) - 1
            entry = {"index": delta.index, **body, "logprobs": None, "finish_reason": None}
            if number == 0:
                entry["logprobs"] = self._logprobs(choice, delta.logprobs, delta.prompt_logprobs)
                entry |= self._kinds(choice, delta.kinds)
            if last and choice.finish_reason is not None:
                entry |= _end(choice)
            made.append(self._envelope([entry], chunk=True) | ({"usage": usage_of()} if usage_of else {}))
        return made

    def _chat_bodies(self, choice: Choice, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Deltas of a message: the first has the role, and there is one even if it says nothing more."""
        bodies = [{"delta": part} for part in parts if part != {"content": ""}] or [{"delta": {}}]
        if not choice.started:
            choice.started = True
            first = bodies[0]["delta"]
            bodies[0] = {"delta": {"role": "assistant", "content": ""} | first}
        return bodies

    def usage_chunk(self, usage_now: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""
        return self._envelope([], chunk=True) | {"usage": usage_now}

    def whole(self) -> dict[str, Any]:
        """A non-streamed answer, once all deltas are taken."""
        made: list[dict[str, Any]] = []
        top: dict[str, Any] = transfer_params(choice.handoff for choice in self.choices)
        for index, choice in enumerate(self.choices):
            body: dict[str, Any] = {"text": choice.text}
            if self.chat:
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": choice.text_or_none,
                }
                body = {"message": message | ({"tool_calls": choice.calls} if choice.calls else {})}
            logprobs = self._logprobs(choice, choice.logprobs, choice.prompt_logprobs)
            made.append(
                {"index": index, **body, "logprobs": logprobs, **_end(choice), **self._kinds(choice, choice.kinds)}
            )
            if choice.prompt.sampling.prompt_logprobs is not None and not self._echoes_logprobs(choice):
                shown = prompt_logprobs(self.tokenizer, choice.prompt_logprobs)
                (top if self.chat else made[-1])["prompt_logprobs"] = shown
        return self._envelope(made, chunk=False) | top | {"usage": self.usage_now()}

    def usage_now(self) -> dict[str, Any]:
        """Usage so far."""
        return usage([choice.prompt for choice in self.choices], [choice.counts for choice in self.choices])

    def _echoes_logprobs(self, choice: Choice) -> bool:
        return choice.prompt.echo is not None and choice.prompt.sampling.logprobs is not None

    def _logprobs(
        self, choice: Choice, entries: Sequence[TokenLogprobs], of_prompt: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        if choice.prompt.sampling.logprobs is None:
            return None
        if self.chat:
            return chat_logprobs(self.tokenizer, entries)
        pairs: list[tuple[int, TokenLogprobs | None]] = []
        if self._echoes_logprobs(choice):
            pairs += zip(choice.prompt.token_ids, of_prompt, strict=False)
        pairs += [(entry.token_id, entry) for entry in entries]
        return choice.completion_logprobs.take(pairs)

    def _kinds(self, choice: Choice, kinds: Sequence[TokenKind]) -> dict[str, Any]:
        if not choice.prompt.with_kinds:
            return {}
        return {
            "token_kinds": [
                {
                    "token": self.tokenizer.token_text(item.token_id),
                    "kind": item.kind,
                    "rejected": [self.tokenizer.token_text(token_id) for token_id in item.rejected_ids],
                }
                for item in kinds
            ]
        }

    def _envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _is_whole(call: dict[str, Any]) -> bool:
    """Whether a call's arguments can be read; a stop string may have cut them."""
    try:
        msgspec.json.decode(call["function"]["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _end(choice: Choice) -> dict[str, Any]:
    made: dict[str, Any] = {"finish_reason": choice.finish_reason}
    return made | ({"incomplete": True} if choice.incomplete else {})
