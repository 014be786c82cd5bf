"""Tools in chat requests: what the model is shown, what it must do, and calls whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Says = Callable[..., Any]
USER = {"role": "user", "content": "weather?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\u00eds {"}}\n</tool_call>'


def streamed(answer: Any) -> dict[str, Any]:
    """A stream's deltas joined into a message, as a client does."""
    message: dict[str, Any] = {"content": "", "tool_calls": [], "finish_reason": None}
    for line in answer.text.splitlines():
        if not line or line == "data: [DONE]":
            continue
        (choice,) = json.loads(line[6:])["choices"]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
        message["content"] += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return message


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_streamed_call_is_the_whole_call(says: Says, step: int) -> None:
    text = f"Sure.\n{CALL}\n{CALL}"
    body = {"messages": [USER], "tools": [TOOL]}
    whole = says(text, step=step).chat(**body).json()["choices"][0]
    parts = streamed(says(text, step=step).chat(**body, stream=True))
    assert whole["finish_reason"] == parts["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == parts["content"] == "Sure."
    calls = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("weather", {"city": "París {"})] * 2
    assert [call["arguments"] for call in parts["tool_calls"]] == [call["arguments"] for call in calls]
    assert len({call["id"] for call in whole["message"]["tool_calls"]}) == 2


def test_without_tools_or_with_none_text_stays_text(says: Says) -> None:
    assert says(CALL).chat(messages=[USER]).json()["choices"][0]["message"]["content"] == CALL
    server = says(CALL)
    message = server.chat(messages=[USER], tools=[TOOL], tool_choice="none").json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALL}
    assert b"tool_call" not in bytes(i for i in server.core.requests[0].prompt_token_ids if i < 256)


def test_without_auto_tool_choice_a_call_must_be_asked_for(says: Says) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        error = says(CALL, auto_tools=False).chat(messages=[USER], tools=[TOOL], **choice).json()["error"]
        assert error["param"] == "tool_choice"
        assert "--no-enable-auto-tool-choice" in error["message"]
        assert says(CALL).chat(messages=[USER], tools=[TOOL], **choice).status_code == 200
    for choice in ({"tool_choice": "required"}, {"tool_choice": "none"}):
        assert says(CALL, auto_tools=False).chat(messages=[USER], tools=[TOOL], **choice).status_code == 200
    assert says("hi", auto_tools=False).chat(messages=[USER]).status_code == 200


def test_one_call_is_delivered_where_parallel_calls_are_off(says: Says) -> None:
    body: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": False}
    text = f"{CALL}\n{CALL}"
    assert len(says(text).chat(**body).json()["choices"][0]["message"]["tool_calls"]) == 1
    assert len(streamed(says(text).chat(**body, stream=True))["tool_calls"]) == 1


def test_a_cut_call_says_length(says: Says) -> None:
    choice = says(CALL[:60], end="length").chat(messages=[USER], tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def tag_of(says: Says, **fields: Any) -> dict[str, Any]:
    server = says(CALL)
    assert server.chat(messages=[USER], tools=[TOOL, OTHER], **fields).status_code == 200
    return json.loads(server.compiler.sources[0].text)["format"] if server.compiler.sources else {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_by_a_stop_string_is_not_one_to_be_made(says: Says, stream: bool) -> None:
    response = says(CALL).chat(messages=[USER], tools=[TOOL], stop=["Par"], stream=stream)
    assert '"finish_reason":"stop"' in response.text.replace(" ", "")
    assert '"finish_reason":"tool_calls"' not in response.text


def test_required_and_named_force_calls_and_auto_does_not(says: Says) -> None:
    assert tag_of(says) == tag_of(says, tool_choice="auto") == {}
    required = tag_of(says, tool_choice="required")
    assert required["at_least_one"]
    assert not required["stop_after_first"]
    assert [tag["begin"] for tag in required["tags"]] == [
        '<tool_call>\n{"name": "weather", "arguments": ',
        '<tool_call>\n{"name": "time", "arguments": ',
    ]
    assert tag_of(says, tool_choice="required", parallel_tool_calls=False)["stop_after_first"]
    named = tag_of(says, tool_choice={"type": "function", "function": {"name": "time"}})
    assert named["stop_after_first"]
    assert len(named["tags"]) == 1


def test_a_strict_tool_has_its_schema_enforced_or_is_refused(says: Says) -> None:
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
    server = says(CALL)
    server.chat(messages=[USER], tools=[strict])
    tags = json.loads(server.compiler.sources[0].text)["format"]
    assert tags["type"] == "triggered_tags"
    assert tags["tags"][0]["content"]["json_schema"]["required"] == ["city"]
    loose = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    assert says(CALL).chat(messages=[USER], tools=[loose], tool_choice="required").status_code == 200
    loose["function"]["strict"] = True  # type: ignore[index]
    error = says(CALL).chat(messages=[USER], tools=[loose]).json()["error"]
    assert error["param"] == "tools"
    assert "/not" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
    ],
)
def test_a_wrong_choice_of_tools_is_refused_by_name(says: Says, fields: dict[str, Any], param: str) -> None:
    assert says("x").chat(messages=[USER], **fields).json()["error"]["param"] == param


def test_a_model_that_was_taught_no_tools_refuses_them(says: Says) -> None:
    error = says("x", tool_format=None).chat(messages=[USER], tools=[TOOL]).json()["error"]
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    assert says("x", tool_format=None).chat(messages=[USER], tools=[TOOL], tool_choice="none").status_code == 200


def test_earlier_calls_and_their_results_reach_the_template(says: Says) -> None:
    server = says("x")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    assert server.chat(messages=messages, tools=[TOOL]).status_code == 200
    prompt = bytes(i for i in server.core.requests[0].prompt_token_ids if i < 256).decode()
    assert '"arguments": {"city": "Oslo"}' in prompt
    assert "tool\nsun" in prompt


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[1].tool_call_id"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
         "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}]},
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_a_message_that_does_not_fit_is_refused_where_it_stands(says: Says, message: Any, param: str) -> None:
    assert says("x").chat(messages=[USER, message]).json()["error"]["param"] == param


def test_a_special_marker_reaches_the_parser_though_special_tokens_are_hidden(new_server: Says) -> None:
    from paceline_engine.messages import RequestOutput

    text = list(b'{"name": "weather", "parameters": {}}')
    server = new_server(
        lambda request: [
            RequestOutput(request_id=request.request_id, new_token_ids=(259, *text, 256), finish_reason="stop")
        ],
        tool_format="llama3_json",
    )
    message = server.chat(messages=[USER], tools=[TOOL]).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    assert message["content"] is None
