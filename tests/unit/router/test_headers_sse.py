"""Header rules and the reading of streams."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import event, word

from paceline_api.runtimes import facts_of
from paceline_router import headers
from paceline_router.body import read_question, with_usage
from paceline_router.errors import ClientError
from paceline_router.sse import LINE_BYTES_MAX, StreamMeter, WholeLines, error_event, without_usage_event

DONE = b"data: [DONE]\n\n"


def test_hop_by_hop_and_private_headers_never_cross():
    sent = headers.for_any_engine(
        {
            "connection": "close, x-mine",
            "x-mine": "1",
            "keep-alive": "5",
            "te": "trailers",
            "upgrade": "h2c",
            "proxy-authorization": "x",
            "transfer-encoding": "chunked",
            "host": "router",
            "authorization": "Bearer sk",
            "x-paceline-anything": "1",
            "accept": "text/event-stream",
        },
        request_id="r",
    )
    assert sent == {"accept": "text/event-stream", "accept-encoding": "identity", "x-request-id": "r"}


def test_only_engines_that_understand_it_are_told_the_tenant_and_only_those_that_ask_the_token():
    private = headers.Private("acme", "s", "t")
    token = {"authorization": "Bearer t"}
    assert private.for_runtime(facts_of("paceline")) == {"x-paceline-tenant": "acme", "x-paceline-salt": "s", **token}
    assert private.for_runtime(facts_of("vllm")) == private.for_runtime(facts_of("llamacpp")) == token
    for name in ("sglang", "ollama", "trtllm", "tritonserver", "nim", "custom", "unheard-of"):
        assert private.for_runtime(facts_of(name)) == {}
    assert headers.Private("acme", "s", None).for_runtime(facts_of("vllm")) == {}


def test_answers_keep_repeated_headers_and_lose_ours():
    raw = [
        (b"Vary", b"a"),
        (b"vary", b"b"),
        (b"Connection", b"X-Gone"),
        (b"x-gone", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Paceline-Load", b"1"),
        (b"X-Request-Id", b"engine"),
        (b"Content-Encoding", b"gzip"),
    ]
    assert headers.for_client(raw, request_id="mine") == [
        (b"vary", b"a"),
        (b"vary", b"b"),
        (b"content-encoding", b"gzip"),
        (b"x-request-id", b"mine"),
    ]


def test_only_a_plain_request_id_is_kept():
    assert headers.request_id({"x-request-id": "abc-1"}, "new") == "abc-1"
    for bad in ("", "a b", "x" * 129, "a\nb", "\u00e9"):
        assert headers.request_id({"x-request-id": bad}, "new") == "new"


def metered(data: bytes) -> StreamMeter:
    meter = StreamMeter()
    meter.feed(data, 1.0)
    return meter


def test_the_role_alone_is_no_content_but_reasoning_and_tools_are():
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    assert metered(role).first_content_s is None
    for delta in ({"content": "a"}, {"reasoning_content": "a"}, {"tool_calls": [{}]}):
        assert metered(event(choices=[{"delta": delta}])).first_content_s == 1.0
    assert metered(event(choices=[{"text": "a"}])).content_events == 1


def test_the_engines_count_wins_over_events():
    stream = word("a") + word("b") + event(choices=[], usage={"completion_tokens": 7}) + DONE
    meter = metered(stream)
    assert (meter.content_events, meter.output_tokens, meter.done, meter.failed) == (2, 7, True, False)
    assert metered(word("a") + word("b") + DONE).output_tokens == 2


def test_an_error_event_is_a_failure():
    assert metered(event(error={"message": "oom"})).failed
    assert metered(error_event({"message": "m"})).failed


def test_nonsense_is_passed_over():
    meter = metered(b": comment\n\ndata: {broken\n\ndata: 5\n\ndata: null\n\nevent: x\n" + word("a"))
    assert meter.content_events == 1


STREAM = word("a") + word("\u00e9") + b"data: {}\r\n\r\n" + DONE


@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_any_cut_of_a_stream_gives_the_same_bytes_in_whole_lines(cuts: list[int]):
    lines = WholeLines()
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [lines.push(STREAM[start:end]) for start, end in pairwise(edges)]
    assert all(piece.endswith(b"\n") for piece in pieces if piece)
    assert b"".join(pieces) + lines.flush() == STREAM


def test_an_endless_line_is_not_held_for_ever():
    lines = WholeLines()
    piece = b"x" * (LINE_BYTES_MAX // 2)
    assert [len(lines.push(piece)) for _ in range(3)] == [0, 0, 3 * len(piece)]


def test_an_error_event_stands_alone_after_an_unfinished_event():
    text = (b'data: {"a": 1}\n' + error_event({"message": "m"})).decode()
    blocks = [block for block in text.split("\n\n") if block.strip()]
    assert json.loads(blocks[-1].removeprefix("data: "))["error"] == {"message": "m"}


USAGE = event(choices=[], usage={"completion_tokens": 3})


def test_only_the_usage_event_is_taken_out():
    both = event(choices=[{"text": "a"}], usage={"completion_tokens": 1})
    assert without_usage_event(both + USAGE + DONE) == both + DONE
    assert without_usage_event(USAGE) == b""
    spoken = word('the word "completion_tokens" in a text')
    assert without_usage_event(spoken) == spoken


@pytest.mark.parametrize("pair", [b',"usage":null', b', "usage": null'])
def test_what_announces_usage_is_kept_from_those_who_did_not_ask(pair: bytes):
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]%s}\n\n'
    assert without_usage_event(event % pair + DONE) == event % b"" + DONE
    spoken = word('a text, "usage":null}') + word('{"a":1,"usage":null}\n')
    assert without_usage_event(spoken) == spoken


@given(
    st.dictionaries(st.sampled_from("abc{"), st.none() | st.text() | st.booleans()), st.sampled_from(["", " ", "\n"])
)
def test_asking_for_usage_changes_nothing_else(fields: dict, space: str):
    document = {**fields, "model": "m", "stream": True}
    body = (space + json.dumps(document)).encode()
    assert read_question(body).needs_usage
    assert json.loads(with_usage(body)) == {**document, "stream_options": {"include_usage": True}}


def test_a_client_cannot_lease_or_name_stored_kv():
    with pytest.raises(ClientError) as refusal:
        read_question(b'{"model": "m", "kv_transfer_params": {"do_remote_decode": true}}')
    assert refusal.value.param == "kv_transfer_params"
    assert read_question(b'{"model": "m", "kv_transfer_params": null}').model == "m"
