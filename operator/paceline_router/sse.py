"""Reads a streamed OpenAI answer as it passes: when content starts, how many tokens, how it ends. Pure.

Content counts in any form a model speaks: text, reasoning or tool calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

LINE_BYTES_MAX = 1 << 20
_CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")
_DONE = b"[DONE]"
# The end of an event. Inside a JSON string the quotes would be escaped, so these are never text.
_USAGE_COMES = (b',"usage":null}\n', b', "usage": null}\n')


@dataclass(slots=True)
class WholeLines:
    """Holds back the part of a line that has not ended, so that a stream that is cut never ends in half an event."""

    _rest: bytes = b""

    def push(self, data: bytes) -> bytes:
        """The lines that are complete now; a line beyond LINE_BYTES_MAX goes through in pieces."""
        cut = data.rfind(b"\n") + 1
        if cut:
            lines, self._rest = self._rest + data[:cut], data[cut:]
            return lines
        self._rest += data
        return self.flush() if len(self._rest) > LINE_BYTES_MAX else b""

    def flush(self) -> bytes:
        """What was held back."""
        rest, self._rest = self._rest, b""
        return rest


@dataclass(slots=True)
class StreamMeter:
    """`first_content_s` is the time given with the bytes that held the first content, in the caller's clock."""

    first_content_s: float | None = None
    content_events: int = 0
    usage_tokens: int | None = None
    done: bool = False
    failed: bool = False

    @property
    def output_tokens(self) -> int:
        """Tokens by the engine's own count when it sent one, else events with content."""
        return self.content_events if self.usage_tokens is None else self.usage_tokens

    def feed(self, lines: bytes, now: float) -> None:
        """Read whole lines that went out at `now`."""
        for line in lines.split(b"\n"):
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == _DONE:
            self.done = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self.failed = True
        tokens = usage_tokens(event)
        if tokens is not None:
            self.usage_tokens = tokens
        if any(_has_content(choice) for choice in event.get("choices") or ()):
            self.content_events += 1
            if self.first_content_s is None:
                self.first_content_s = now


def usage_tokens(answer: dict[str, Any]) -> int | None:
    """`usage.completion_tokens` of an answer or event, if it states one."""
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None


def without_usage_event(lines: bytes) -> bytes:
    """The lines less what only a client that asks for usage gets: an event with nothing else, and null before it."""
    for announced in _USAGE_COMES:
        lines = lines.replace(announced, b"}\n")
    if b'"completion_tokens"' not in lines:
        return lines
    kept: list[bytes] = []
    skip_blank = False
    for line in lines.split(b"\n"):
        if _is_usage_only(line):
            skip_blank = True
        elif skip_blank and not line.strip():
            skip_blank = False
        else:
            kept.append(line)
    return b"\n".join(kept)


def _is_usage_only(line: bytes) -> bool:
    if not line.startswith(b"data:") or b'"completion_tokens"' not in line:
        return False
    try:
        event = json.loads(line[5:])
    except ValueError:
        return False
    return isinstance(event, dict) and event.get("choices") == [] and usage_tokens(event) is not None


def error_event(error: dict[str, str | None]) -> bytes:
    """The event that ends a broken stream. The leading blank line closes an event that lacks its own."""
    return b"\ndata: " + json.dumps({"error": error}).encode() + b"\n\n"


def _has_content(choice: object) -> bool:
    if not isinstance(choice, dict):
        return False
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in _CONTENT_FIELDS)
