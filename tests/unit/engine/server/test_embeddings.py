"""/v1/embeddings: what is accepted, in which shape it is answered, and which field an error names."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from paceline_engine.messages import AddRequest, RequestOutput
from paceline_engine.server.embeddings import AT_ONCE, MAX_INPUTS

SIZE = 8  # The model's hidden size.
MAX_MODEL_LEN = 512


def vector_of(token_ids: Sequence[int]) -> list[float]:
    """Any unit vector that tells inputs apart; exact in float32."""
    made = [0.0] * SIZE
    made[sum(token_ids) % SIZE], made[(sum(token_ids) + 1) % SIZE] = 0.6, 0.8
    return list(struct.unpack(f"<{SIZE}f", struct.pack(f"<{SIZE}f", *made)))


def script(request: AddRequest) -> list[RequestOutput]:
    assert request.embed
    packed = struct.pack(f"<{SIZE}f", *vector_of(request.prompt_token_ids))
    return [RequestOutput(request_id=request.request_id, finish_reason="stop", embedding=packed, num_cached_tokens=1)]


@pytest.fixture
def server(new_server: Callable[..., Any]) -> Any:
    return new_server(script)


def embed(server: Any, given: Any, **more: Any) -> httpx.Response:
    return server.call("/v1/embeddings", {"model": "m", "input": given} | more)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("abc", [[97, 98, 99]]),
        (["abc", "d"], [[97, 98, 99], [100]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [5]], [[97, 98], [5]]),
    ],
)
def test_all_four_kinds_of_input_in_the_order_of_the_inputs(server: Any, given: Any, ids: list[list[int]]) -> None:
    answer = embed(server, given).json()
    assert [list(request.prompt_token_ids) for request in server.core.requests] == ids
    assert answer["object"] == "list" and answer["model"] == "m"
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", index) for index in range(len(ids))
    ]
    assert [item["embedding"] for item in answer["data"]] == [vector_of(tokens) for tokens in ids]
    count = sum(map(len, ids))
    assert answer["usage"] == {
        "prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": {"cached_tokens": len(ids)},
    }  # fmt: skip


def test_base64_is_float32_in_little_endian(server: Any) -> None:
    (item,) = embed(server, "abc", encoding_format="base64").json()["data"]
    assert struct.unpack(f"<{SIZE}f", base64.b64decode(item["embedding"])) == tuple(vector_of([97, 98, 99]))


@pytest.mark.parametrize("form", ["float", "base64"])
@pytest.mark.parametrize("dimensions", [1, 3, SIZE])
def test_fewer_dimensions_are_a_unit_vector_again(server: Any, dimensions: int, form: str) -> None:
    # The vector of [6] is 0.6 at 6 and 0.8 at 7, that of [0] at 0 and 1.
    data = embed(server, [[6], [0]], dimensions=dimensions, encoding_format=form).json()["data"]
    vectors = [item["embedding"] for item in data]
    if form == "base64":
        vectors = [struct.unpack(f"<{dimensions}f", base64.b64decode(vector)) for vector in vectors]
    assert [len(vector) for vector in vectors] == [dimensions] * 2
    assert all(math.isfinite(value) for vector in vectors for value in vector)
    assert math.hypot(*vectors[1]) == pytest.approx(1.0, abs=1e-6)
    expected = [0.6, 0.8] if dimensions > 1 else [1.0]
    assert list(vectors[1][: len(expected)]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "more", "param", "says"),
    [
        ("", {}, "input", "input is empty"),
        ([], {}, "input", "at least 1"),
        (["a", "", "b"], {}, "input[1]", "input[1] is empty"),
        ([[1], []], {}, "input[1]", "at least 1"),
        (["a", "b", "c", 4], {}, "input[3]", "input[3]"),
        ([[1], [2, "x"]], {}, "input[1][1]", "input[1][1]"),
        ([[1], [2], [3], [4, 999]], {}, "input[3]", "input[3]: token id 999 is outside the vocabulary of 300"),
        ([-1], {}, "input[0]", "input[0]"),
        (["a", "b" * (MAX_MODEL_LEN + 1)], {}, "input[1]", "this model's context is 512 tokens: input[1] has 513"),
        ([[7] * (MAX_MODEL_LEN + 1)], {}, "input[0]", "input[0] has 513 tokens"),
        (["a"] * (MAX_INPUTS + 1), {}, "input", "at most 2048"),
        (7, {}, "input", "input"),
        ("a", {"dimensions": 0}, "dimensions", "dimensions"),
        ("a", {"dimensions": SIZE + 1}, "dimensions", "this model's embeddings have 8: ask for 1 to 8"),
        ("a", {"dimensions": "3"}, "dimensions", "dimensions"),
        ("a", {"encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ("a", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ("a", {"pooling": "mean"}, "pooling", "unknown parameter"),
    ],
)
def test_errors_name_the_field(server: Any, given: Any, more: dict[str, Any], param: str, says: str) -> None:
    response = embed(server, given, **more)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert says in error["message"]
    assert error["param"] == param
    assert server.core.requests == []


def test_a_missing_input_and_another_model(server: Any) -> None:
    assert server.call("/v1/embeddings", {"model": "m"}).json()["error"]["message"] == "input is missing"
    assert server.call("/v1/embeddings", {"model": "x", "input": "a"}).status_code == 404


def test_user_salt_priority_and_deadline_are_taken(server: Any) -> None:
    embed(server, "a", user="u", cache_salt="s", priority=3, deadline_ms=5000)
    (request,) = server.core.requests
    assert (request.salt, request.priority) == ("s", 3)
    assert 4.5 < request.e2e_s <= 5.0
    server.call(
        "/v1/embeddings", {"model": "m", "input": "a", "priority": 3, "deadline_ms": 5000},
        x_paceline_salt="t", x_paceline_tenant="acme", x_paceline_priority="-2", x_paceline_deadline_ms="900",
    )  # fmt: skip
    request = server.core.requests[1]
    assert (request.salt, request.tenant, request.priority) == ("t", "acme", -2)
    assert request.e2e_s <= 0.9


def test_2048_inputs_are_answered_in_order_though_few_are_with_the_core_at_once(new_server: Callable[..., Any]) -> None:
    most = 0

    def counting(request: AddRequest) -> list[RequestOutput]:
        nonlocal most
        most = max(most, sum(not stream.closed for stream in server.core.streams))
        return script(request)

    server = new_server(counting)
    given = [[index % 256, index // 256] for index in range(MAX_INPUTS)]
    data = embed(server, given).json()["data"]
    assert [item["index"] for item in data] == list(range(MAX_INPUTS))
    assert [item["embedding"] for item in data] == [vector_of(tokens) for tokens in given]
    assert 1 < most <= AT_ONCE


def test_inputs_beyond_the_room_in_the_queue_wait_for_their_own(new_server: Callable[..., Any]) -> None:
    server = new_server(script)
    server.core.room_for = lambda count: sum(not stream.closed for stream in server.core.streams) + count <= 3
    data = embed(server, [[index] for index in range(20)]).json()["data"]
    assert [item["embedding"] for item in data] == [vector_of([index]) for index in range(20)]


def test_one_input_that_fails_ends_all_and_nothing_is_left_with_the_core(new_server: Callable[..., Any]) -> None:
    def failing(request: AddRequest) -> list[RequestOutput]:
        if request.prompt_token_ids[0] < 5:
            return script(request)
        if request.prompt_token_ids[0] > 5:
            return []  # It would run for ever.
        return [
            RequestOutput(request_id=request.request_id, finish_reason="error", error_kind="internal", error="it broke")
        ]

    server = new_server(failing)
    response = embed(server, [[index] for index in range(10)])
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "it broke"
    assert all(stream.closed for stream in server.core.streams)
    assert server.engine.in_flight == 0


def test_a_missed_deadline_is_a_504(new_server: Callable[..., Any]) -> None:
    def late(request: AddRequest) -> list[RequestOutput]:
        return [
            RequestOutput(
                request_id=request.request_id, finish_reason="deadline", error_kind="deadline", error="it passed"
            )
        ]

    assert embed(new_server(late), ["a", "b"]).status_code == 504
