"""Reads one JSON object {"name": ..., "arguments": {...}} a character at a time and lets its arguments through.

Structure is followed (strings, nesting, members), values are not checked: arguments reach the client as the model wrote
them. Pure.
"""

from __future__ import annotations

import json

_SPACES = " \t\r\n"


class NotACall(ValueError):
    """What was read can't become a call; everything read so far is text."""


class CallScanner:
    """One object, from its `{`. `name` is known from some character on; arguments before it are held back."""

    def __init__(self, argument_keys: tuple[str, ...]) -> None:
        self._argument_keys = argument_keys
        self.raw = ""
        self.name: str | None = None
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        # Of the member being read: its key, and its value's text.
        self._key: str | None = None
        self._text = ""
        self._wants = "begin"
        self._held = ""
        self._has_arguments = False
        self._passes = False

    def push(self, char: str) -> str:
        """Arguments that can be sent now. Raises NotACall, only while the name is not known."""
        self.raw += char
        if self._in_string:
            self._string(char)
        else:
            self._structure(char)
        return self._release()

    def _release(self) -> str:
        """Arguments read so far, once the name is known."""
        if self.name is None:
            if self.done:
                raise NotACall(self.raw)
            return ""
        if self.done and not self._has_arguments:
            self._has_arguments, self._held = True, "{}"
        text, self._held = self._held, ""
        return text

    def _string(self, char: str) -> None:
        self._take(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1:
                self._scalar_ended()

    def _scalar_ended(self) -> None:
        """A string at the top has ended: a key, or a whole value."""
        if self._wants == "key":
            self._key, self._text, self._wants = self._decoded(self._text), "", "colon"
        elif self._wants == "value":
            self._value_ended()

    def _structure(self, char: str) -> None:
        if char == '"':
            if self._depth == 1 and self._wants == "key" and self._text:
                self._broken()
            self._in_string = True
            self._begin_value()
            self._take(char)
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1:
            self._between(char)
        else:
            self._take(char)

    def _open(self, char: str) -> None:
        if self._depth == 0 and char == "{" and self._wants == "begin":
            self._depth, self._wants = 1, "key"
            return
        if self._depth == 1 and self._wants not in ("value",):
            self._broken()
        self._begin_value(is_object=char == "{")
        self._depth += 1
        self._take(char)

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            if self._wants == "value" and self._text.strip():
                self._value_ended()
            self.done = True
            return
        self._take(char)
        if self._depth == 1:
            self._value_ended()

    def _between(self, char: str) -> None:
        """A character at the top, outside strings."""
        if char == ":" and self._wants == "colon":
            self._wants = "value"
        elif char == ",":
            if self._wants == "value" and self._text.strip():
                self._value_ended()
            self._wants = "key"
        elif char not in _SPACES:
            if self._wants != "value":
                self._broken()
            self._take(char)  # a number, true, false or null

    def _begin_value(self, *, is_object: bool = False) -> None:
        if self._depth == 1 and self._wants == "value" and not self._text:
            self._passes = is_object and self._key in self._argument_keys and not self._has_arguments
            self._has_arguments = self._has_arguments or self._passes

    def _take(self, char: str) -> None:
        if self._passes:
            self._held += char
        else:
            self._text += char

    def _value_ended(self) -> None:
        """A member of the top is complete."""
        text, self._text, self._wants = self._text, "", "comma"
        if self._passes:
            self._passes = False
            return
        if self._key == "name" and self.name is None:
            name = self._decoded(text)
            if not name:
                self._broken()
            self.name = name
        elif self._key in self._argument_keys and not self._has_arguments:
            # Some models write the arguments as a string that holds JSON.
            value = self._decoded(text)
            if value:
                self._has_arguments, self._held = True, value

    def _decoded(self, text: str) -> str | None:
        try:
            value = json.loads(text)
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def _broken(self) -> None:
        if self.name is None:
            raise NotACall(self.raw)
