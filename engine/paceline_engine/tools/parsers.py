"""Parsers of the two common formats. Whatever is no call is text, to the last character; nothing sent is taken back.

hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call> anywhere in the text, as Hermes 2 Pro and Qwen 2.5 and
3 write it. llama3_json: an answer that is {"name": ..., "parameters": {...}}, several divided by `;`, perhaps behind
<|python_tag|>, as Llama 3.1 and later write it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline_engine.tools.call_scanner import CallScanner, NotACall
from paceline_engine.tools.events import CallArguments, CallBegin, Content, Event, ToolParser, joined

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class _Parser:
    """Shared parts: text waits in `_text` until `_step` knows what it is."""

    def __init__(self, names: Collection[str], argument_keys: tuple[str, ...]) -> None:
        self._names = frozenset(names)
        self._argument_keys = argument_keys
        self._text = ""
        self._scanner: CallScanner | None = None
        self._prefix = ""
        self._index = 0
        self._begun = False

    def push(self, text: str) -> list[Event]:
        """Events that became certain with this text."""
        self._text += text
        events: list[Event] = []
        while self._text:
            before = self._state()
            events += self._read_call() if self._scanner is not None else self._outside()
            if self._state() == before:
                break
        return joined(events)

    def finish(self) -> list[Event]:
        """A call that never got a name is text; so is what looked like the beginning of one."""
        rest = self._text
        if self._scanner is not None and not self._begun:
            rest = self._prefix + self._scanner.raw + rest
        elif self._begun or self._after_call():
            rest = "" if not rest.strip() else rest
        self._text, self._scanner = "", None
        return joined([Content(rest)])

    def _state(self) -> tuple[object, ...]:
        """Changes while there is progress."""
        return (self._text, self._scanner, self._index)

    def _outside(self) -> list[Event]:
        raise NotImplementedError

    def _after_call(self) -> bool:
        """Whether the last thing read was a call."""
        return self._index > 0

    def _begin_scan(self, prefix: str) -> None:
        """The next character should be the `{` of a call; `prefix` is the text before it if it is none."""
        self._prefix, self._scanner, self._begun = prefix, CallScanner(self._argument_keys), False

    def _accepts(self, _name: str) -> bool:
        return True

    def _read_call(self) -> list[Event]:
        """Feed the scanner until the call is complete or turns out to be none."""
        events: list[Event] = []
        scanner = self._scanner
        assert scanner is not None
        for at, char in enumerate(self._text):
            try:
                arguments = scanner.push(char)
                if not self._begun and scanner.name is not None and not self._accepts(scanner.name):
                    raise NotACall(scanner.raw)
            except NotACall:
                self._text, self._scanner = self._text[at + 1 :], None
                return [*events, *self._as_text(self._prefix + scanner.raw)]
            if scanner.name is not None and not self._begun:
                self._begun = True
                events.append(CallBegin(self._index, scanner.name))
            if arguments:
                events.append(CallArguments(self._index, arguments))
            if scanner.done:
                self._text, self._scanner, self._begun = self._text[at + 1 :], None, False
                self._index += 1
                self._ended_call()
                return events
        self._text = ""
        return events

    def _as_text(self, text: str) -> list[Event]:
        return [Content(text)]

    def _ended_call(self) -> None:
        """A call is complete."""


class HermesParser(_Parser):
    """Calls between tags."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, ("arguments", "parameters"))
        self._wants_end = False

    def _ended_call(self) -> None:
        self._wants_end = True

    def _state(self) -> tuple[object, ...]:
        return (*super()._state(), self._wants_end)

    def _outside(self) -> list[Event]:
        if self._wants_end:
            return self._skip_end()
        at = self._text.find(TOOL_CALL)
        if at >= 0:
            before, behind = self._text[:at].rstrip(), self._text[at + len(TOOL_CALL) :]
            lead = self._text[len(before) : at] + TOOL_CALL
            body = behind.lstrip()
            if not body:
                return []
            self._text = body
            self._begin_scan(lead + behind[: len(behind) - len(body)])
            return [Content(before)]
        keep = _held(self._text, TOOL_CALL)
        text, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return [Content(text)]

    def _skip_end(self) -> list[Event]:
        """The closing tag; what a model wrote instead of it stays text."""
        body = self._text.lstrip()
        if body.startswith(TOOL_CALL_END):
            self._text, self._wants_end = body[len(TOOL_CALL_END) :], False
        elif not TOOL_CALL_END.startswith(body):
            self._wants_end = False
        return []

    def finish(self) -> list[Event]:
        """As for all; the beginning of a closing tag that the end cut off is dropped."""
        if self._wants_end and self._scanner is None and TOOL_CALL_END.startswith(self._text.lstrip()):
            self._text = ""
        return super().finish()


class LlamaParser(_Parser):
    """An answer that is nothing but calls of known tools."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, ("parameters", "arguments"))
        self._is_text = False

    def _accepts(self, name: str) -> bool:
        return name in self._names

    def _state(self) -> tuple[object, ...]:
        return (*super()._state(), self._is_text)

    def _as_text(self, text: str) -> list[Event]:
        self._is_text = True
        return [Content(text)]

    def _outside(self) -> list[Event]:
        if self._is_text:
            text, self._text = self._text, ""
            return [Content(text)]
        body = self._text.lstrip()
        if self._index > 0 and body.startswith(";"):
            body = body[1:].lstrip()
        if body.startswith(PYTHON_TAG):
            body = body[len(PYTHON_TAG) :].lstrip()
        if not body or PYTHON_TAG.startswith(body):
            return []
        if not body.startswith("{"):
            self._is_text = True
            return []
        prefix = self._text[: len(self._text) - len(body)]
        self._text = body
        self._begin_scan(prefix)
        return []

    def finish(self) -> list[Event]:
        """As for all; a divider behind the last call is no text."""
        if self._scanner is None and self._index > 0 and not self._is_text:
            self._text = self._text.strip().removeprefix(";").strip()
        return super().finish()


def _held(text: str, tag: str) -> int:
    """Length of the end of `text` that may stand before or in a tag: white space, then a beginning of the tag."""
    size = next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
    body = text[: len(text) - size]
    return size + len(body) - len(body.rstrip())


PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser}
"""By the names that vLLM gives them."""
MARKERS = {"hermes": (TOOL_CALL, TOOL_CALL_END), "llama3_json": (PYTHON_TAG,)}
"""Tokens that a parser must see, whether or not special tokens are skipped."""


def detect_format(template: str | None) -> str | None:
    """The format that a chat template teaches the model; None if it teaches no tools."""
    if template is None or "tools" not in template:
        return None
    if TOOL_CALL in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template or PYTHON_TAG in template else None
