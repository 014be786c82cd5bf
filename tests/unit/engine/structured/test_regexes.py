"""Regexes of requests: what the compiler would silently read as something else is refused or written out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline_engine.structured import source as sources
from paceline_engine.structured.regexes import RegexRefused, checked


@pytest.mark.parametrize(
    "pattern",
    ["a^b", "a$b", "(a$)b", "(a|b$)c", "a(^b)", "a(b|^c)", "(a)^", r"\Aab\Z", r"[\p{L}]+", r"\p{L}", r"[a\h]", "(a$)+"],
)
def test_what_the_compiler_would_misread_is_refused(pattern: str) -> None:
    with pytest.raises(RegexRefused, match="is not"):
        checked(pattern)
    with pytest.raises(RegexRefused):
        sources.structural_tag({"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}})


def test_a_regex_of_any_size_is_refused_at_once() -> None:
    with pytest.raises(RegexRefused, match="longer than"):
        checked("(" * 10**7)


@pytest.mark.parametrize(
    "pattern",
    [
        "^abc$", "^a|b$", "^(a|b)$", "(^a$|^b$)", "a|^b", "(?:^a)b", r"a\.b", "[.^$|]", r"[^\]a]+", r"\d{2}-\w+",
        r"\$\^", "((a)$)", "(a|)b", "",
    ],
)  # fmt: skip
def test_what_means_the_same_everywhere_stays(pattern: str) -> None:
    assert checked(pattern) == pattern


def test_a_dot_is_no_line_break(grammars: Any) -> None:
    texts = ["ab", "a\n", "a\r", "a.", "aé", "a\u2028"]
    accepted = grammars.accepted(sources.regex("a."), texts)
    assert accepted == {"ab", "a.", "aé"}
    assert accepted <= {text for text in texts if re.fullmatch("a.", text)}
