"""OpenAI response payloads: chat and completion objects, whole or as stream chunks, and usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from paceline_engine.server.engine import Delta
from paceline_engine.server.errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the status line is out."""
    return event(error.body())


def usage(num_prompt: int, num_output: int) -> dict[str, int]:
    """Token counts; the output's include the token that ended it."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


@dataclass(frozen=True, slots=True)
class Answer:
    """Builds the payloads of one response. `chat` picks the object's shape."""

    id: str
    model: str
    created: int
    chat: bool

    def chunk(self, delta: Delta, *, first: bool, with_usage: bool) -> dict[str, Any]:
        """A stream chunk; with `with_usage` it says that usage comes later, as OpenAI does."""
        if self.chat:
            content: dict[str, Any] = {"role": "assistant"} if first else {}
            choice: dict[str, Any] = {"index": delta.index, "delta": content | {"content": delta.text}}
        else:
            choice = {"index": delta.index, "text": delta.text}
        choice |= {"logprobs": None, "finish_reason": delta.finish_reason}
        return self._envelope([choice], chunk=True) | ({"usage": None} if with_usage else {})

    def usage_chunk(self, num_prompt: int, num_output: int) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""
        return self._envelope([], chunk=True) | {"usage": usage(num_prompt, num_output)}

    def whole(self, texts: list[str], ends: list[Delta], num_prompt: int) -> dict[str, Any]:
        """A non-streamed answer; `ends` are the choices' last deltas."""
        choices: list[dict[str, Any]] = []
        for text, end in zip(texts, ends, strict=True):
            body: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": end.index, **body, "logprobs": None, "finish_reason": end.finish_reason})
        num_output = sum(end.num_tokens for end in ends)
        return self._envelope(choices, chunk=False) | {"usage": usage(num_prompt, num_output)}

    def _envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
