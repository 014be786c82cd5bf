"""Regular expressions of requests, made to mean for the grammar compiler what they mean everywhere else.

The compiler reads some constructs as something else without a word: anchors in the middle as nothing, unknown escapes
as letters, `.` as any character, line breaks too. Here the first two are refused and the third is written out. The
rest, look-around or unbalanced brackets, the compiler refuses itself. Pure text, no xgrammar.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\.|\(\?:|\(\?<\w+>|\[(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_CLASS_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
MAX_CHARS = 256 * 1024
_LETTERS = frozenset("bBdDwWsSnrtfvxuc")
_DOT = r"[^\n\r\u2028\u2029]"


class RegexRefused(ValueError):
    """The expression can't be enforced; the text says why."""


def checked(pattern: str) -> str:
    """The pattern for the compiler; it matches whole outputs. Raises RegexRefused."""
    if len(pattern) > MAX_CHARS:
        raise RegexRefused(f"it is longer than {MAX_CHARS} characters")
    return _Checker().run(pattern)


class _Checker:
    """One pass over a pattern; `begins` and `ended` say whether an anchor there changes nothing."""

    def __init__(self) -> None:
        self._begins = True
        self._ended = False
        # Of each open group: whether it begins, and whether one of its alternatives ended, the output.
        self._groups: list[tuple[bool, bool]] = []
        self._top = (True, False)

    def run(self, pattern: str) -> str:
        made: list[str] = []
        for match in _TOKEN.finditer(pattern):
            token = match[0]
            if token == "^":
                if not self._begins:
                    raise RegexRefused(f"^ at position {match.start()} is not at the beginning")
            elif token == "$":
                self._ended = True
            elif token == "|":
                self._next_alternative()
            elif token.startswith("("):
                self._item(match.start(), begins=self._begins)
                self._groups.append(self._top)
                self._top = (self._begins, False)
            elif token == ")":
                self._close()
            else:
                self._item(match.start())
                _check_escapes(token)
            made.append(_DOT if token == "." else token)
        return "".join(made)

    def _item(self, at: int, *, begins: bool = False) -> None:
        if self._ended:
            raise RegexRefused(f"$ before position {at} is not at the end")
        self._begins = begins

    def _next_alternative(self) -> None:
        begins, ended = self._top
        self._top = (begins, ended or self._ended)
        self._begins, self._ended = begins, False

    def _close(self) -> None:
        self._ended = self._ended or self._top[1]
        self._begins = False
        if self._groups:
            self._top = self._groups.pop()


def _check_escapes(token: str) -> None:
    for match in _CLASS_ESCAPE.finditer(token):
        if match[1].isalpha() and match[1] not in _LETTERS:
            raise RegexRefused(f"the escape {match[0]} is not supported")
