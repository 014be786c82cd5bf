"""Tool calls in text: the same events however the text is cut; nothing that is no call is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_engine.tools.events import CallArguments, CallBegin, Content, Event, joined
from paceline_engine.tools.parsers import PARSERS, detect_format

ARGUMENTS = '{"a": "x}\\"{", "b": [1, {"c": 2}], "d": "é</tool_call>"}'
CALL = [CallBegin(0, "f"), CallArguments(0, ARGUMENTS)]
CASES: list[tuple[str, str, list[Event]]] = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>', [*CALL]),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>', [*CALL]),
    (
        "hermes",
        'Let me see. \n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
        [Content("Let me see."), CallBegin(0, "f"), CallArguments(0, "{}"), CallBegin(1, "g"), CallArguments(1, "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone.',
        [CallBegin(0, "f"), CallArguments(0, "{}"), Content("\n\nDone.")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [CallBegin(0, "f"), CallArguments(0, '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [CallBegin(0, "f"), CallArguments(0, '{"a": 1')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "id": 3, "arguments": {"a": null}, "x": [{}]}</tool_call>',
        [CallBegin(0, "f"), CallArguments(0, '{"a": null}')],
    ),
    ("llama3_json", f' \n{{"name": "f", "parameters": {ARGUMENTS}}}', [*CALL]),
    ("llama3_json", f'<|python_tag|>{{"name": "f", "arguments": {ARGUMENTS}}};', [*CALL]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": "; {"}}',
        [CallBegin(0, "f"), CallArguments(0, "{}"), CallBegin(1, "g"), CallArguments(1, '{"b": "; {"}')],
    ),
    *(
        (form, text, [Content(text)] if text else [])
        for form, text in [
            ("hermes", "plain <tool_ text < <tool_call"),
            ("hermes", "<tool_call>not json</tool_call> after"),
            ("hermes", '<tool_call>{"nam": 1}</tool_call>x'),
            ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
            ("hermes", '<tool_call> [{"name": "f"}]</tool_call>'),
            ("hermes", '<tool_call> \n{"na'),
            ("hermes", "text  \n "),
            ("hermes", ""),
            ("llama3_json", '{"name": "Bob", "parameters": {}} and'),
            ("llama3_json", '{"x": 1}'),
            ("llama3_json", 'hello {"name": "f", "parameters": {}}'),
            ("llama3_json", "<|python_tag|>print(1)"),
            ("llama3_json", "<|pyth"),
            ("llama3_json", ""),
        ]
    ),
]


def parse(form: str, *pieces: str) -> list[Event]:
    parser = PARSERS[form](["f", "g"])
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish())


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_events_are_the_same_wherever_the_text_is_cut(form: str, text: str, expected: list[Event]) -> None:
    assert parse(form, text) == expected
    assert parse(form, *text) == expected
    for at in range(len(text) + 1):
        assert parse(form, text[:at], text[at:]) == expected
        assert parse(form, text[:at], text[at : at + 2], text[at + 2 :]) == expected


def test_a_name_is_told_before_the_arguments_are_complete() -> None:
    parser = PARSERS["hermes"](["f"])
    events = parser.push('<tool_call>{"name": "f", "arguments": {"city": "Par')
    assert events == [CallBegin(0, "f"), CallArguments(0, '{"city": "Par')]


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), _values, max_size=3), st.booleans(), st.integers(1, 7))
def test_any_arguments_survive(arguments: dict[str, Any], ascii_only: bool, size: int) -> None:
    body = json.dumps(arguments, ensure_ascii=ascii_only)
    for form, text in (
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {body}}}</tool_call>'),
        ("llama3_json", f'{{"name": "f", "parameters": {body}}}'),
    ):
        name, found = parse(form, *(text[at : at + size] for at in range(0, len(text), size)))
        assert name == CallBegin(0, "f")
        assert isinstance(found, CallArguments)
        assert json.loads(found.text) == arguments


@given(st.text(alphabet='<>tool_ca/{}"name:f, \\;[1]', max_size=60))
def test_no_text_breaks_a_parser_or_is_cut_differently(text: str) -> None:
    for form in PARSERS:
        assert parse(form, *text) == parse(form, text)


def test_the_format_is_the_templates() -> None:
    assert detect_format("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detect_format('{% if tools %}{"name": x, "parameters": y}{% endif %}') == "llama3_json"
    assert detect_format("{{ messages }}") is None
    assert detect_format(None) is None
