"""YAML as kubectl reads it, with the line of every field, and errors that lead to the place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_cli.yaml_source import Document, Position, SourceError, Unreadable, read_documents


def only(text: str) -> Document:
    (document,) = read_documents(text)
    return document


def syntax_error(text: str) -> SourceError:
    with pytest.raises(Unreadable) as caught:
        list(read_documents(text))
    return caught.value.error


def test_every_field_knows_its_line() -> None:
    document = only("# head\nspec:\n  model:\n    source: a\n  list:\n  - x: 1\n  - {y: 2,\n     z: 3}\n")
    lines = {path: position.line for path, position in document.positions.items()}
    assert lines[("spec",)] == 2
    assert lines[("spec", "model", "source")] == 4
    assert lines[("spec", "list", 0, "x")] == 6
    assert lines[("spec", "list", 1)] == 7
    assert lines[("spec", "list", 1, "z")] == 8


def test_a_missing_field_is_shown_at_the_field_that_lacks_it() -> None:
    document = only("kind: A\nspec:\n  engine:\n    a: 1\n")
    assert document.position_of(("spec", "engine", "maxNumSeqs", "deep")).line == 3
    assert document.position_of(("metadata", "name")) == Position(1, 1)


def test_lines_count_from_the_file_and_not_from_the_document() -> None:
    first, second = read_documents("---\n---\na: 1\n---\nb: 2\n")
    assert (first.value, first.positions[("a",)].line) == ({"a": 1}, 3)
    assert (second.value, second.positions[("b",)].line) == ({"b": 2}, 5)


def test_a_key_given_twice_is_an_error_that_names_both_lines() -> None:
    document = only("spec:\n  replicas: 1\n  model: {}\n  replicas: 2\n")
    (error,) = document.errors
    assert (error.position.line, error.path) == (4, ("spec", "replicas"))
    assert "first on line 2" in error.message


def test_merge_keys_and_aliases_are_resolved_and_may_be_overridden() -> None:
    document = only("base: &b {a: 1, c: 1}\nuse:\n  <<: *b\n  a: 2\nagain: *b\n")
    assert document.value["use"] == {"a": 2, "c": 1}
    assert document.value["again"] == {"a": 1, "c": 1}
    assert document.errors == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2026-01-31", "2026-01-31"),
        ("22:30", "22:30"),
        ("yes", True),
        ("~", None),
        ("0.5", 0.5),
        ("'1'", "1"),
    ],
)
def test_scalars_are_read_as_kubectl_reads_them(text: str, value: object) -> None:
    assert only(f"a: {text}\n").value == {"a": value}


def test_keys_become_text() -> None:
    assert only("true: a\n1: b\nc: d\n").value == {"true": "a", "1": "b", "c": "d"}


@pytest.mark.parametrize(
    ("text", "position", "advice"),
    [
        ("a: 1\nb:\n\tc: 2\n", Position(3, 1), "spaces, not tabs"),
        ("a: b: c\n", Position(1, 5), "quote"),
        ("a: [1,\n2\n", Position(3, 1), "close the bracket"),
        ("a:\n  b: 1\n c: 2\n", Position(3, 2), "align"),
        ("a: *x\n", Position(1, 4), "define it"),
        ("a: 1\nb: \x07\n", Position(2, 4), "control character"),
        ("[" * 5000, Position(1, 1), "nested"),
    ],
)
def test_syntax_errors_say_where_and_what_to_do(text: str, position: Position, advice: str) -> None:
    error = syntax_error(text)
    assert error.position == position
    assert advice in error.message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: !!python/object:os.system ls\n", "has no JSON value"),
        ("a: !!python/object/apply:os.system [ls]\n", "has no JSON value"),
        ("a: !!binary aGk=\n", "has no JSON value"),
        ("a: .nan\n", "not a JSON number"),
        ("a: &x [*x]\n", "contains it"),
        ("? [a]\n: 1\n", "plain text"),
        ("~: 1\n", "empty"),
    ],
)
def test_what_json_lacks_is_refused_and_never_run(text: str, why: str) -> None:
    (error,) = only(text).errors
    assert why in error.message


def test_aliases_cannot_make_a_small_file_huge() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (error,) = only("\n".join(lines)).errors
    assert "fewer aliases" in error.message


_names = st.text("abcdefgh", min_size=1, max_size=5)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | _names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=15,
)


@given(st.dictionaries(_names, _values, min_size=1, max_size=4))
def test_json_comes_back_as_it_is(value: dict[str, object]) -> None:
    import json

    document = only(json.dumps(value, indent=1))
    assert document.value == value
    assert document.errors == []


@given(st.text(alphabet="ab:-[]{}&*!'\"\n \t#?|>%@`,", max_size=40))
def test_any_text_is_read_or_refused_at_a_place(text: str) -> None:
    try:
        documents = list(read_documents(text))
        positions = [document.position for document in documents]
    except Unreadable as refused:
        positions = [refused.error.position]
    assert all(1 <= position.line <= len(text) + 1 for position in positions)
