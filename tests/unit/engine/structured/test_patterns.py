"""Patterns accept what they should within JSON strings: compared with Python's `re` over every short text."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest

from paceline_engine.structured.patterns import PatternRefused, searchable
from paceline_engine.structured.source import GrammarSource

TEXTS = ["".join(chars) for size in range(6) for chars in itertools.product("ab1", repeat=size)]


def random_pattern(dice: random.Random, depth: int = 0) -> str:
    if depth > 2 or dice.random() < 0.45:
        base = dice.choice(["a", "b", "1", "[ab]", "[^1]", "\\d", "."])
    else:
        inner = "".join(random_pattern(dice, depth + 1) for _ in range(dice.randint(1, 3)))
        base = f"({inner}|{random_pattern(dice, depth + 1)})" if dice.random() < 0.3 else f"({inner})"
    return base if dice.random() < 0.5 else base + dice.choice(["?", "*", "+", "{2}", "{1,3}", "{0,2}", "{2,}", "+?"])


@pytest.mark.parametrize("seed", range(4))
def test_a_pattern_is_found_exactly_where_re_finds_it(grammars: Any, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(40):
        pattern = "".join(random_pattern(dice) for _ in range(dice.randint(1, 3)))
        pattern = dice.choice(["^{}$", "^{}", "{}$", "{}", "^{}$|^ab"]).format(pattern)
        source = GrammarSource(kind="grammar", text=f"root ::= {searchable(pattern)}")
        expected = {text for text in TEXTS if re.search(pattern, text)}
        assert grammars.accepted(source, TEXTS) == expected, pattern


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?i)a", "(a)\\1", "\\bx", "a$b", "(^a)b", "[[:alpha:]]", "[", "*", "a{3,1}", "x{", '^"$', "\\\\"),
        *("\\n", "a" * 3000, "a{20000}", "\\p{L}", "[^\\D]"),
    ],
)
def test_what_can_not_be_kept_is_refused(pattern: str) -> None:
    with pytest.raises(PatternRefused):
        searchable(pattern)


@pytest.mark.parametrize("pattern", [".", "[^x]", "\\S", "\\W", "\\D", "[!-~]", "[\\s\\S]"])
def test_no_pattern_breaks_the_json_around_it(grammars: Any, pattern: str) -> None:
    source = GrammarSource(kind="grammar", text=f"root ::= {searchable(f'^{pattern}$')}")
    assert grammars.accepted(source, ['"', "\\", "\n", "\x01", "\x1f", "!"]) == {"!"}
