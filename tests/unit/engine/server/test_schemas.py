"""Request validation: what is accepted, what is refused by name, what asks for nothing."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline_engine.server.chat_schemas import ChatRequest
from paceline_engine.server.errors import ApiError
from paceline_engine.server.schemas import CompletionRequest, parse

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "p"} | fields).encode())


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400
    assert refused.value.kind == "invalid_request_error"
    return refused.value


NOT_BUILT: dict[str, Any] = {
    "echo": True, "best_of": 2, "suffix": "x", "functions": [{}], "audio": {}, "store": True, "reasoning_effort": "low",
    "modalities": ["audio"], "truncate_prompt_tokens": 5, "use_beam_search": True, "length_penalty": 1.5,
    "logits_processors": ["x"], "detokenize": False, "spaces_between_special_tokens": False, "documents": [{}],
    "prediction": {}, "web_search_options": {}, "function_call": "auto",
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_parameter_that_is_not_built_is_refused_by_name(name: str) -> None:
    error = refusal(**{name: NOT_BUILT[name]})
    assert error.param == name
    assert error.code == "unsupported_parameter"
    assert repr(name) in error.message


ASKS_FOR_NOTHING: dict[str, Any] = {
    "n": 1, "best_of": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "logit_bias": {}, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "store": False,
    "parallel_tool_calls": True, "skip_special_tokens": True, "service_tier": "auto", "user": "u-1", "seed": None,
    "top_logprobs": 0,
    "stop": None, "tools_": None, "temperature": None, "max_tokens": None, "logprobs_": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ASKS_FOR_NOTHING)
def test_a_value_that_asks_for_nothing_is_accepted(name: str) -> None:
    chat(**{name: ASKS_FOR_NOTHING[name]})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"n": True}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"top_k": 2**63}, "top_k"),
        ({"top_k": 10**20}, "top_k"),
        ({"max_tokens": 10**20}, "max_tokens"),
        ({"max_completion_tokens": 10**20}, "max_completion_tokens"),
        ({"stop_token_ids": [10**20]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [USER | {"role": ["tool"]}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"messages": [USER | {"extra": 1}]}, "messages[0].extra"),
        ({"model": 5}, "model"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param is not None
    assert error.param.startswith(param)
    assert param.split(".")[0].split("[")[0] in error.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a"] * 17}, "stop: List should have at most 16 items after validation, not 17"),
        ({"stop": ["a", ""]}, "stop[1]: String should have at least 1 character"),
        ({"prompt": ["x"] * 65}, "prompt: Value should have at most 64 items after validation, not 65"),
        ({"prompt": [[1]] * 65}, "prompt: Value should have at most 64 items after validation, not 65"),
        ({"prompt": []}, "prompt: List should have at least 1 item after validation, not 0"),
        ({"prompt": [[1], []]}, "prompt[1]: List should have at least 1 item after validation, not 0"),
        ({"prompt": [1, -1]}, "prompt[1]: Input should be greater than or equal to 0"),
    ],
)
def test_a_value_of_the_wrong_size_is_told_its_bound(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert refused.value.message == message


def test_an_image_part_is_refused_where_it_stands() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    error = refusal(messages=[{"role": "user", "content": parts}])
    assert error.param is not None
    assert error.param.startswith("messages[0].content")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"model": NaN}', b"\xff\xfe", b'{"a":' * 5000, b'{"model": "\\ud800"}']
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse(ChatRequest, body)
    assert refused.value.status == 400


@given(
    body=st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode)
)
def test_no_body_breaks_the_parser(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse(CompletionRequest, body)


@given(
    st.dictionaries(
        st.sampled_from([*CompletionRequest.model_fields, "best_of", "tools", "zzz"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=6,
        ),
    )
)
def test_any_object_is_a_request_or_a_400(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    if (
        set(fields) <= {"model", "prompt"}
        and isinstance(fields.get("model"), str)
        and isinstance(fields.get("prompt"), str)
    ):
        assert parse(CompletionRequest, body).prompts == [fields["prompt"]]
        return
    with contextlib.suppress(ApiError):  # any other exception would be a 500
        parse(CompletionRequest, body)


def test_a_body_of_too_many_small_parts_is_refused_before_it_is_read_and_text_is_not_counted() -> None:
    many = b'{"model": "m", "messages": [' + b",".join([b'{"role": "user", "content": ""}'] * 100_000) + b"]}"
    with pytest.raises(ApiError, match="more than 100000 objects and lists"):
        parse(ChatRequest, many)
    text = json.dumps(['"{[' * 100_000])[1:-1].encode()
    assert len(parse(CompletionRequest, b'{"model": "m", "prompt": ' + text + b"}").prompts[0]) == 300_000


@pytest.mark.parametrize("name", ["prompt", "stop", "stop_token_ids", "allowed_token_ids", "bad_words"])
def test_of_many_wrong_values_one_is_told(name: str) -> None:
    body = {"model": "m", "prompt": "a"} | {name: [-1] * 1000}
    with pytest.raises(ApiError) as error:
        parse(CompletionRequest, json.dumps(body).encode())
    cause = error.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= 4


def test_null_content_fields_of_an_echoed_assistant_message_are_dropped() -> None:
    echoed = {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None, "audio": None}
    assert chat(messages=[USER, echoed, USER]).messages[1].for_template("messages[1]") == {
        "role": "assistant",
        "content": "hello",
    }


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = chat(messages=[{"role": "developer", "content": parts, "name": "n"}]).messages[0]
    assert message.for_template("messages[0]") == {"role": "system", "content": "ab", "name": "n"}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_every_form_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [["a"]], {"a": 1}, 5, ["x"] * 65, [True], [10**20], [[1], [10**20]]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt=prompt)
    assert refused.value.param is not None
    assert refused.value.param.startswith("prompt")
