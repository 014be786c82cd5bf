"""From a body to what the core is asked, and from its outputs to answers, whole and streamed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs

from paceline_engine.messages import AddRequest, RequestOutput, SamplingParams, TokenLogprobs

Says = Callable[..., Any]


def sampling(says: Says, **fields: Any) -> SamplingParams:
    server = says("x")
    answer = server.complete(**fields)
    assert answer.status_code == 200, answer.text
    return server.core.requests[0].sampling


def refused(says: Says, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    server = says("x")
    own: dict[str, Any] = (
        {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    answer = server.call(path, {"model": "m"} | own | fields)
    assert answer.status_code == 400, answer.text
    assert not server.core.requests
    return answer.json()["error"]


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_every_sampling_parameter_reaches_the_core(says: Says) -> None:
    params = sampling(
        says, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1.5, frequency_penalty=-0.5,
        repetition_penalty=1.2, logit_bias={"9": -100, "3": 5}, allowed_token_ids=[4, 2, 4], seed=-3,
        stop_token_ids=[8], min_tokens=2, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1.5, frequency_penalty=-0.5,
        repetition_penalty=1.2, logit_bias=((3, 5.0), (9, -100.0)), allowed_token_ids=(2, 4), seed=-3,
        stop_token_ids=(8,), min_tokens=2, ignore_eos=True, logprobs=2, prompt_logprobs=1,
    )  # fmt: skip


def test_bad_words_are_tokenised_as_they_begin_a_text_and_behind_a_space(says: Says) -> None:
    assert sampling(says, bad_words=["ab", " ab"]).bad_words == (tuple(b"ab"), tuple(b" ab"))
    assert refused(says, bad_words=[" "])["param"] == "bad_words"


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-38, 5e-324])
def test_a_tiny_temperature_is_greedy(says: Says, temperature: float) -> None:
    params = sampling(says, temperature=temperature, top_p=0.5, top_k=3, min_p=0.5)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 33}, "n"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"guided_regex": "a^b"}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_what_only_the_model_tells_wrong_is_a_400_that_names_the_field(
    says: Says, fields: dict[str, Any], param: str | None
) -> None:
    assert refused(says, **fields)["param"] == param


def test_an_unsupported_schema_keyword_is_pointed_at(says: Says) -> None:
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
    error = refused(says, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert "/properties/a~1b/uniqueItems" in error["message"]
    assert error["code"] == "unsupported_schema"


def test_n_choices_have_seeds_of_their_own_and_one_prompt(says: Says) -> None:
    server = says("hey")
    body = server.complete(n=3, temperature=1, seed=11).json()
    seeds = [request.sampling.seed for request in server.core.requests]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 12)
    again = says("hey")
    again.complete(n=3, temperature=1, seed=11)
    assert [request.sampling.seed for request in again.core.requests] == seeds


def test_the_routers_headers_win_over_the_body(says: Says) -> None:
    server = says("x")
    body = {"model": "m", "prompt": "a", "cache_salt": "mine", "priority": 5, "deadline_ms": 60_000}
    server.call("/v1/completions", body)
    server.call(
        "/v1/completions",
        body,
        x_paceline_salt="salt",
        x_paceline_tenant="acme",
        x_paceline_priority="-2",
        x_paceline_deadline_ms="500",
    )
    own, routed = server.core.requests
    assert (own.salt, own.tenant, own.priority) == ("mine", "", 5)
    assert own.e2e_s == pytest.approx(60, abs=0.1)
    assert (routed.salt, routed.tenant, routed.priority) == ("salt", "acme", -2)
    assert routed.e2e_s == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("header", ["x_paceline_deadline_ms", "x_paceline_priority"])
def test_a_header_that_is_no_number_is_refused_by_name(says: Says, header: str) -> None:
    answer = says("x").call("/v1/completions", {"model": "m", "prompt": "a"}, **{header: "soon"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header.replace("_", "-")


def ends(reason: str, **more: Any) -> Callable[[AddRequest], list[RequestOutput]]:
    return lambda request: [RequestOutput(request_id=request.request_id, finish_reason=reason, **more)]


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (ends("deadline", error="took too long"), 504, "deadline_exceeded"),
        (ends("error", error="can't be met", error_kind="deadline"), 504, "deadline_exceeded"),
        (ends("error", error="does not fit", error_kind="invalid"), 400, "invalid_value"),
        (ends("error", error="full", error_kind="queue_full"), 503, "queue_full"),
        (ends("error", error="asleep", error_kind="asleep"), 503, "asleep"),
        (ends("error", error="logits are NaN"), 500, "engine_error"),
        (ends("abort"), 503, "aborted"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_irregular_end_has_its_answer(new_server: Says, script: Any, status: int, code: str, stream: bool) -> None:
    answer = new_server(script).complete(stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_deadline_that_passed_while_the_body_was_read_never_reaches_the_core(says: Says) -> None:
    server = says("x")
    answer = server.call("/v1/completions", {"model": "m", "prompt": "a"}, x_paceline_deadline_ms="0")
    assert answer.status_code == 504
    assert not server.core.requests


def test_stop_strings_do_not_end_an_output_before_min_tokens(says: Says) -> None:
    assert says("abcabc").complete(stop="b", max_tokens=20).json()["choices"][0]["text"] == "a"
    assert says("abcabc").complete(stop="b", max_tokens=20, min_tokens=4).json()["choices"][0]["text"] == "abca"


def test_a_stop_string_can_be_kept(says: Says) -> None:
    for stream in (False, True):
        answer = says("one END two").complete(stop=["D t", "END"], include_stop_str_in_output=True, stream=stream)
        choices = [part["choices"][0] for part in (events(answer.text) if stream else [answer.json()])]
        assert "".join(choice["text"] for choice in choices) == "one END"


def test_special_tokens_are_shown_where_that_is_asked_for(new_server: Says) -> None:
    def script(request: AddRequest) -> list[RequestOutput]:
        return [RequestOutput(request_id=request.request_id, new_token_ids=(65, 257, 66), finish_reason="length")]

    assert new_server(script).complete().json()["choices"][0]["text"] == "AB"
    shown = new_server(script).complete(skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == "A<|im_start|>B"


def with_logprobs(text: bytes, of_prompt: bool = False) -> Callable[[AddRequest], Sequence[RequestOutput]]:
    """A token an output, each with its logprobs."""

    def script(request: AddRequest) -> list[RequestOutput]:
        prompt = [None, *(TokenLogprobs(i, -0.25, 1, ((i, -0.25),)) for i in request.prompt_token_ids[1:])]
        outputs: list[RequestOutput] = []
        for at, byte in enumerate(text):
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    new_token_ids=(byte,),
                    logprobs=(TokenLogprobs(byte, -0.5, 2, ((120, -0.1), (byte, -0.5))),),
                    prompt_logprobs=tuple(prompt) if of_prompt and at == 0 else (),
                    finish_reason="length" if at == len(text) - 1 else None,
                )
            )
        return outputs

    return script


def test_chat_logprobs_have_one_entry_a_token_whole_and_streamed(new_server: Says) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    server = new_server(with_logprobs("aé".encode()))
    content = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0x61], [0xC3], [0xA9]]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [0x61],
        "top_logprobs": [
            {"token": "x", "logprob": -0.1, "bytes": [120]},
            {"token": "a", "logprob": -0.5, "bytes": [0x61]},
        ],
    }
    parts = events(new_server(with_logprobs("aé".encode())).chat(**fields, stream=True).text)
    streamed = [entry for part in parts for entry in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    assert refused(lambda _: server_of(new_server), "/v1/chat/completions", top_logprobs=1)["param"] == "top_logprobs"


def server_of(new_server: Says) -> Any:
    return new_server(with_logprobs(b"a"))


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_with_echo_cover_prompt_and_output(new_server: Says, stream: bool) -> None:
    server = new_server(with_logprobs(b"de", of_prompt=True))
    answer = server.complete(logprobs=1, echo=True, max_tokens=2, stream=stream)
    choices = [part["choices"][0] for part in (events(answer.text) if stream else [answer.json()])]
    assert "".join(choice["text"] for choice in choices) == "abcde"
    joined = {name: [x for choice in choices for x in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
    assert joined["tokens"] == ["a", "b", "c", "d", "e"]
    assert joined["text_offset"] == [0, 1, 2, 3, 4]
    assert joined["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
    assert joined["top_logprobs"][0] is None
    assert joined["top_logprobs"][3] == {"x": -0.1, "d": -0.5}
    assert server.core.requests[0].sampling.prompt_logprobs == 1


def test_echo_with_zero_tokens_scores_the_prompt(new_server: Says) -> None:
    server = new_server(with_logprobs(b"d", of_prompt=True))
    body = server.complete(logprobs=1, echo=True, max_tokens=0).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert body["usage"]["completion_tokens"] == 0
    assert server.core.requests[0].sampling.max_tokens == 1


def test_prompt_logprobs_have_vllms_shape(new_server: Says) -> None:
    body = new_server(with_logprobs(b"d", of_prompt=True)).complete(prompt_logprobs=1).json()
    entries = body["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1] == {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}


def test_each_token_says_how_speculation_came_by_it(new_server: Says) -> None:
    def script(request: AddRequest) -> list[RequestOutput]:
        def out(ids: bytes, drafted: int, accepted: int, end: str | None = None, wrong: bytes = b"") -> RequestOutput:
            return RequestOutput(
                request_id=request.request_id, new_token_ids=tuple(ids), num_draft_tokens=drafted,
                num_accepted_tokens=accepted, finish_reason=end, rejected_token_ids=tuple(wrong),
            )  # fmt: skip

        # Of the last step's guesses one ended the output itself, and one stood behind it.
        return [out(b"a", 0, 0), out(b"bc", 3, 1, wrong=b"xy"), out(b"def", 2, 2), out(b"gh", 3, 1, "length")]

    expected = [
        ("a", "plain", []), ("b", "accepted", []), ("c", "replacement", ["x", "y"]), ("d", "accepted", []),
        ("e", "accepted", []), ("f", "bonus", []), ("g", "accepted", []), ("h", "accepted", []),
    ]  # fmt: skip
    for stream in (False, True):
        answer = new_server(script).complete(return_token_kinds=True, stream=stream)
        parts = events(answer.text) if stream else [answer.json()]
        kinds = [item for part in parts for item in part["choices"][0]["token_kinds"]]
        assert [(item["token"], item["kind"], item["rejected"]) for item in kinds] == expected
    assert "token_kinds" not in new_server(script).complete().json()["choices"][0]


def test_a_traffic_class_reaches_the_core_and_a_bad_one_is_named(says: Says) -> None:
    server = says("x")
    assert server.chat(traffic_class="batch.v2_x-1", n=2).status_code == 200
    assert server.complete().status_code == 200
    assert [request.traffic_class for request in server.core.requests] == ["batch.v2_x-1", "batch.v2_x-1", ""]
    for wrong in ("a b", "x" * 65, "é", "a\n", 7):
        assert refused(says, traffic_class=wrong)["param"] == "traffic_class"


def test_usage_tells_cached_and_predicted_tokens(new_server: Says) -> None:
    def script(request: AddRequest) -> list[RequestOutput]:
        first = RequestOutput(request_id=request.request_id, new_token_ids=(65,), num_cached_tokens=2)
        rest = {"new_token_ids": (66, 67), "num_draft_tokens": 4, "num_accepted_tokens": 1}
        return [first, RequestOutput(request_id=request.request_id, finish_reason="length", **rest)]  # type: ignore[arg-type]

    usage = new_server(script).complete().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 3}
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = events(new_server(script).complete(stream=True, stream_options=options).text)
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 3, 3]
    assert parts[-1] == parts[-1] | {"choices": [], "usage": usage}


@pytest.mark.parametrize("text", ["日本語テキスト", "👩‍👩‍👧 family 🇯🇵", "ne\u0301e\u0301", "mixed é 😀 end"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_streamed_text_never_shows_a_broken_character(says: Says, text: str, step: int) -> None:
    parts = events(says(text, step=step).chat(stream=True).text)
    pieces = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert says(text, step=step).chat().json()["choices"][0]["message"]["content"] == text


# --- constraints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_choice": ["a", 'b"']}, "grammar", 'root ::= "a" | "b\\""'),
        ({"structured_outputs": {"grammar": "root ::= [a]"}}, "grammar", "root ::= [a]"),
        ({"guided_json": '{"type": "null"}'}, "json", '{"type":"null"}'),
        ({"structured_outputs": {"json": {"const": 1}}}, "json", '{"enum":[1]}'),
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object","additionalProperties":{}}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}, "strict": True}}},
            "json",
            '{"enum":[1]}',
        ),
    ],
)
def test_each_way_to_constrain_becomes_a_grammar(says: Says, fields: dict[str, Any], kind: str, text: str) -> None:
    server = says("x")
    assert server.complete(**fields).status_code == 200
    (source,) = server.compiler.sources
    assert (source.kind, source.text) == (kind, text)
    # The core has loaded it before the request comes.
    assert server.core.loaded == server.core.constraints == [source.key("")]


def test_a_grammar_that_the_core_cannot_load_is_our_fault_and_reaches_it_with_no_request(says: Says) -> None:
    server = says("x")
    server.core.refusal = "it is damaged"
    response = server.complete(guided_regex="a+")
    assert (response.status_code, response.json()["error"]["message"]) == (500, "guided_regex: it is damaged")
    assert server.core.requests == []


def test_a_device_without_grammars_refuses_by_field_before_anything_is_compiled(says: Says) -> None:
    server = says("x")
    ready = structs.replace(server.engine.serving.ready, follows_constraints=False)
    server.engine.set_serving(dataclasses.replace(server.engine.serving, ready=ready))
    error = server.complete(guided_regex="a+").json()["error"]
    assert error["param"] == "guided_regex"
    assert "can't follow constraints" in error["message"]
    assert server.compiler.sources == []


@pytest.mark.parametrize(
    ("text", "end", "incomplete"), [('{"a":1', "length", True), ('{"a":1}', "length", None), ('{"a":1}', "stop", None)]
)
def test_json_that_was_cut_is_flagged(says: Says, text: str, end: str, incomplete: bool | None) -> None:
    for stream in (False, True):
        answer = says(text, end=end).chat(response_format={"type": "json_object"}, stream=stream)
        last = (events(answer.text)[-1] if stream else answer.json())["choices"][0]
        assert last["finish_reason"] == end
        assert last.get("incomplete") == incomplete
    assert "incomplete" not in says(text, end=end).chat().json()["choices"][0]


def test_a_stop_string_inside_json_is_flagged_too(says: Says) -> None:
    choice = says('{"a": "stop"}').chat(response_format={"type": "json_object"}, stop="st").json()["choices"][0]
    assert (choice["finish_reason"], choice["incomplete"]) == ("stop", True)


# --- templates, tokenize, other endpoints ----------------------------------------------------------------------------


def prompt_of(server: Any) -> str:
    return bytes(i for i in server.core.requests[-1].prompt_token_ids if i < 256).decode()


def test_the_last_message_can_be_continued(says: Says) -> None:
    server = says("x")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is "}]
    assert server.chat(messages=messages, continue_final_message=True).status_code == 200
    assert prompt_of(server).endswith("assistant\nThe answer is")
    assert server.chat(messages=messages, add_generation_prompt=False).status_code == 200
    assert prompt_of(server).endswith("The answer is \n")
    both = server.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.json()["error"]["param"] == "continue_final_message"


def test_template_variables_reach_the_template_and_never_replace_its_own(says: Says) -> None:
    server = says("x")
    server.chat(chat_template_kwargs={"extra": "EXTRA"})
    assert "EXTRA" in prompt_of(server)
    for name in ("messages", "tools", "add_generation_prompt"):
        assert server.chat(chat_template_kwargs={name: 1}).status_code == 400


@pytest.mark.parametrize("name", ["self", "args", "context", "continue_final", "a b", ""])
def test_no_name_of_a_template_variable_breaks_the_server(says: Says, name: str) -> None:
    assert says("x").chat(chat_template_kwargs={name: 1}).status_code == 200


CALL = {"id": "1", "function": {"name": "f", "arguments": 0}}


@pytest.mark.parametrize("depth", [100, *range(900, 990, 3)])
def test_deeply_nested_values_are_an_answer_or_a_400(says: Says, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": 0}}}
    for fields, text in (
        ({"tools": [tool]}, nested),
        ({"tools": [tool], "tool_choice": "required"}, nested),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, json.dumps(nested)),
        ({"chat_template_kwargs": {"extra": 0}}, nested),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": 0}}}}, nested),
        ({"structured_outputs": {"structural_tag": {"format": 0}}}, nested),
    ):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields)
        response = says("x").call("/v1/chat/completions", body.replace(": 0", f": {text}").encode())
        assert response.status_code == 200 or response.json()["error"]["type"] == "invalid_request_error", fields.keys()


def test_a_template_of_the_request_needs_trust(says: Says) -> None:
    refusal = says("x").chat(chat_template="{{ messages[0].content }}!")
    assert refusal.json()["error"]["param"] == "chat_template"
    from datetime import datetime

    from paceline_engine.chat_template import ChatTemplate

    server = says("x", make_template=lambda text: ChatTemplate(text, {}, datetime.now))
    assert server.chat(chat_template="{{ messages[0].content }}!").status_code == 200
    assert prompt_of(server) == "hi!"
    assert server.chat(chat_template="{% if").json()["error"]["param"] == "chat_template"


def test_no_template_is_a_400_with_the_remedy_and_completions_still_work(says: Says) -> None:
    server = says("x")
    object.__setattr__(server.engine.serving, "template", None)
    assert "--chat-template" in server.chat().json()["error"]["message"]
    assert server.complete().status_code == 200


def test_tokenize_and_detokenize_are_inverse(says: Says) -> None:
    server = says("x")
    answer = server.call("/tokenize", {"prompt": "é<|im_start|>a", "return_token_strs": True}).json()
    assert answer["tokens"] == [0xC3, 0xA9, 257, 97]
    assert (answer["count"], answer["max_model_len"]) == (4, 512)
    assert answer["token_strs"][2] == "<|im_start|>"
    assert server.call("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "é<|im_start|>a"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    server.chat()
    assert server.call("/tokenize", {"model": "m"} | chat).json()["tokens"] == list(
        server.core.requests[0].prompt_token_ids
    )
    assert server.call("/detokenize", {"tokens": [300]}).json()["error"]["param"] == "tokens"
    assert server.call("/tokenize", {"prompt": "a", "x": 1}).status_code == 400
    assert server.call("/tokenize", {"model": "other", "prompt": "a"}).status_code == 404


def test_other_endpoints_are_refused_by_name(says: Says) -> None:
    error = says("x").call("/v1/responses", {"model": "m", "input": "a"}).json()["error"]
    assert error["code"] == "unsupported_endpoint"
    assert "/v1/responses" in error["message"]


def test_the_admin_port_passes_commands_to_the_core(says: Says) -> None:
    server = says("x")
    for path in ("/reset_prefix_cache", "/sleep?level=2", "/wake_up"):
        assert server.call(path, b"", admin=True).status_code == 200
    assert server.core.commands == [("reset_prefix_cache", {}), ("sleep", {"level": "2"}), ("wake", {})]
    assert server.get("/is_sleeping", admin=True).json() == {"is_sleeping": False}
    assert server.get("/admin/explain", admin=True).json()["done"] == "explain"
    load = server.get("/v1/load", admin=True).json()
    assert load["tokenizer_digest"] == "t"
    assert load["epoch"] == server.engine.events.epoch


def test_an_adapter_is_served_as_a_model_until_it_is_unloaded(says: Says) -> None:
    server = says("x")
    assert server.complete(model="tuned").status_code == 404
    assert server.call("/v1/load_lora_adapter", {"lora_name": "m", "lora_path": "/a"}, admin=True).status_code == 400
    loaded = server.call("/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": "file:///a"}, admin=True)
    assert loaded.json() == {"lora_name": "tuned", "digest": "d"}
    assert server.core.commands == [("load_adapter", {"name": "tuned", "path": "/a"})]
    assert [(model["id"], model["parent"]) for model in server.get("/v1/models").json()["data"]] == [
        ("m", None),
        ("tuned", "m"),
    ]
    assert server.get("/v1/models/tuned").json()["parent"] == "m"
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert server.complete(model="tuned").json()["model"] == "tuned"
    server.complete()
    assert [request.adapter for request in server.core.requests] == ["tuned", None]
    assert server.call("/v1/unload_lora_adapter", {"lora_name": "tuned"}, admin=True).status_code == 200
    assert server.complete(model="tuned").status_code == 404
    assert server.call("/v1/unload_lora_adapter", {"lora_name": "tuned"}, admin=True).status_code == 404


def test_an_adapter_that_can_not_be_loaded_is_not_served(says: Says) -> None:
    server = says("x")
    body = {"lora_name": "tuned", "lora_path": "/a"}
    server.call("/v1/load_lora_adapter", body, admin=True)
    server.core.refusal = "2 requests use the adapter 'tuned'"
    assert server.call("/v1/load_lora_adapter", body, admin=True).status_code == 409
    assert server.complete(model="tuned").status_code == 200
    server.core.refusal = "/a has no adapter_config.json"
    refused = server.call("/v1/load_lora_adapter", body, admin=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
    assert server.complete(model="tuned").status_code == 404


@pytest.mark.parametrize(("silent", "ready", "live"), [(7.0, 200, 200), (8.5, 503, 200), (10.5, 503, 503)])
def test_a_core_that_makes_no_progress_is_not_ready_within_ten_seconds(
    says: Says, silent: float, ready: int, live: int
) -> None:
    server = says("x")
    server.core.silent_seconds = lambda: silent
    assert server.get("/health/ready").status_code == ready
    assert server.get("/health/live").status_code == live


def test_a_client_that_leaves_within_its_body_is_no_error(says: Says) -> None:
    from starlette.types import Message

    from paceline_engine.server.routes import build_http_app

    parts: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"", "app": None,
    }  # fmt: skip
    sent: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(build_http_app(says("x").engine, None)(scope, receive, send))
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep?level=7", b"", "level"),
        ("/admin/drain", b'{"deadline_s": -1}', "deadline_s"),
        ("/admin/drain", b'{"deadline_s": NaN}', "deadline_s"),
        ("/admin/drain", b'{"deadline_s": 1e400}', "deadline_s"),
        ("/admin/drain", b'{"deadline_s": "x"}', "deadline_s"),
        ("/admin/drain", b"{", None),
    ],
)
def test_a_wrong_order_on_the_admin_port_is_refused_by_name(
    says: Says, path: str, body: bytes, param: str | None
) -> None:
    server = says("x")
    response = server.call(path, body, admin=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert server.core.commands == []


def test_a_sleeping_engine_serves_nothing_and_is_not_ready(says: Says) -> None:
    from paceline_engine.messages import CoreStats

    server = says("x")
    server.core.stats = CoreStats(asleep=True)
    answer = server.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
    assert server.get("/health/ready").status_code == 503
    assert server.get("/health/live").status_code == 200
