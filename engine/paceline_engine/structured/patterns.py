"""Regular expressions for the inside of JSON strings, rewritten as EBNF for the grammar compiler.

The compiler's own way of putting a pattern into a JSON schema accepts too much: an optional group that has a loop in it
can lose its beginning. Its EBNF is right. What comes out here matches whole strings, of characters that need no escape,
in which the pattern is found somewhere (ECMA-262, as JSON Schema says); fewer than that at times, never more. Pure
text, no xgrammar.
"""

from __future__ import annotations

import re
import warnings

MAX_PATTERN_CHARS = 2048
MAX_REPEAT = 10_000
Ranges = list[tuple[int, int]]

_TOP = 0x10FFFF
# Control characters, quote, backslash and what UTF-8 has no form for.
_UNSAFE: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: Ranges = [(9, 0xD), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
_SPACES += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_CONTROLS = {"n": 0xA, "r": 0xD, "t": 9, "f": 0xC, "v": 0xB}
_LITERALS = frozenset(".*+?()[]{}|^$/-")
_REPEAT = re.compile(r"\{(\d{1,6})(?:(,)(\d{0,6}))?\}")


class PatternRefused(ValueError):
    """The pattern can't be enforced; the text says why."""


def searchable(pattern: str) -> str:
    """EBNF of the strings in which `pattern` is found. Raises PatternRefused."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternRefused(f"it is longer than {MAX_PATTERN_CHARS} characters")
    return _Translator(pattern).run()


def of_length(least: int, most: int | None) -> str:
    """EBNF of strings of `least` to `most` characters. Raises PatternRefused."""
    if max(least, most or 0) > MAX_REPEAT:
        raise PatternRefused(f"lengths above {MAX_REPEAT} are not supported")
    return f"({_ANY}{{{least},{'' if most is None else most}}})"


def _without(ranges: Ranges, cut: Ranges) -> Ranges:
    """Code points of `ranges` that are not in `cut`, in order."""
    kept: Ranges = []
    for low, high in sorted(ranges):
        for cut_low, cut_high in sorted(cut):
            if cut_low > low:
                kept.append((low, min(high, cut_low - 1)))
            low = max(low, cut_high + 1)
            if low > high:
                break
        if low <= high:
            kept.append((low, high))
    return [(low, high) for low, high in kept if low <= high]


def _class_of(ranges: Ranges) -> str:
    """EBNF class of what of these code points can stand in a JSON string. Raises PatternRefused if nothing can."""
    safe = _without(ranges, _UNSAFE)
    if not safe:
        raise PatternRefused("a part of it only matches quotes, backslashes or control characters")
    return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" if low < high else f"\\U{low:08x}" for low, high in safe) + "]"


_ANY = _class_of([(0, _TOP)])
# Engines differ in whether \w, \d and \s go beyond ASCII: what is generated holds in all of them.
_POSITIVE = {"d": _DIGITS, "w": _WORD, "s": [(0x20, 0x20)]}
_WIDEST = {"d": [*_DIGITS, (0x80, _TOP)], "w": [*_WORD, (0x80, _TOP)], "s": _SPACES}


class _Translator:
    """One pass over a pattern."""

    def __init__(self, pattern: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                re.compile(pattern)
        except (re.error, FutureWarning, OverflowError, RecursionError) as error:
            raise PatternRefused(f"it is not a valid regular expression: {error}") from error
        self._text = pattern
        self._at = 0

    def run(self) -> str:
        """The whole pattern."""
        parts = [self._outermost()]
        while self._at < len(self._text):
            self._at += 1
            parts.append(self._outermost())
        return f"({' | '.join(parts)})"

    def _outermost(self) -> str:
        """An alternative of the whole; its anchors become the ends of the string."""
        begins_here = self._text.startswith("^", self._at)
        self._at += begins_here
        items = self._sequence()
        ends_here = self._text.startswith("$", self._at)
        self._at += ends_here
        if self._at < len(self._text) and self._text[self._at] != "|":
            raise PatternRefused("$ is only supported at the end")
        anything = f"{_ANY}*"
        return " ".join([*([] if begins_here else [anything]), *items, *([] if ends_here else [anything])]) or '""'

    def _sequence(self) -> list[str]:
        """Items up to `|`, `)`, `$` or the end."""
        items: list[str] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)$":
            items.append(self._item() + self._quantifier())
        return items

    def _item(self) -> str:
        char = self._text[self._at]
        if char == "(":
            return self._group()
        self._at += 1
        if char == "[":
            return _class_of(self._class())
        if char == ".":
            return _class_of(_without([(0, _TOP)], [(0xA, 0xA), (0xD, 0xD), (0x85, 0x85), (0x2028, 0x2029)]))
        if char == "\\":
            return _class_of(self._escape(in_negated=False))
        if char in "^{}]":
            what = (
                "^ is only supported at the beginning" if char == "^" else f"a literal {char} must be written \\{char}"
            )
            raise PatternRefused(what)
        return _class_of([(ord(char), ord(char))])

    def _group(self) -> str:
        if self._text.startswith("(?", self._at) and not self._text.startswith("(?:", self._at):
            raise PatternRefused("groups such as (?=...), (?!...) and (?P<...>...) are not supported")
        self._at += 3 if self._text.startswith("(?:", self._at) else 1
        parts = [" ".join(self._sequence()) or '""']
        while self._text[self._at] == "|":
            self._at += 1
            parts.append(" ".join(self._sequence()) or '""')
        if self._text[self._at] == "$":
            raise PatternRefused("$ is only supported at the end")
        self._at += 1
        return f"({' | '.join(parts)})"

    def _quantifier(self) -> str:
        match = _REPEAT.match(self._text, self._at)
        made = match[0] if match else self._text[self._at : self._at + 1]
        if match:
            if max(int(match[1]), int(match[3] or 0)) > MAX_REPEAT:
                raise PatternRefused(f"repeats above {MAX_REPEAT} are not supported")
        elif made not in ("*", "+", "?"):
            return ""
        self._at += len(made)
        if self._text.startswith("?", self._at):  # lazy: the same strings
            self._at += 1
        return made

    def _class(self) -> Ranges:
        """The code points of [...], from behind its bracket."""
        negated = self._text.startswith("^", self._at)
        self._at += negated
        begin, made = self._at, list[tuple[int, int]]()
        while self._text[self._at] != "]" or self._at == begin:
            low = self._member(in_negated=negated)
            if self._text[self._at] == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                high = self._member(in_negated=negated)
                made.append((low[0][0], high[0][1]))
            else:
                made += low
        self._at += 1
        return _without([(0, _TOP)], made) if negated else made

    def _member(self, *, in_negated: bool) -> Ranges:
        char = self._text[self._at]
        self._at += 1
        if char == "\\":
            return self._escape(in_negated=in_negated)
        if char == "]":
            raise PatternRefused("] at the beginning of [...] must be written \\]")
        return [(ord(char), ord(char))]

    def _escape(self, *, in_negated: bool) -> Ranges:
        """Code points of an escape, from behind its backslash."""
        char = self._text[self._at : self._at + 1]
        self._at += 1
        kind = char.lower()
        if kind in _POSITIVE:
            if char.isupper() and in_negated:
                raise PatternRefused(f"\\{char} is not supported inside [^...]")
            # What is excluded is read widely, what is generated narrowly.
            return (
                _without([(0, _TOP)], _WIDEST[kind]) if char.isupper() else (_WIDEST if in_negated else _POSITIVE)[kind]
            )
        if char in _CONTROLS:
            return [(_CONTROLS[char], _CONTROLS[char])]
        if char in _LITERALS or char in '\\"':
            return [(ord(char), ord(char))]
        raise PatternRefused(f"the escape \\{char} is not supported")
