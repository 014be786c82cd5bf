"""Answers whose tokens come many at once: who asks the core for that, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.messages import AddRequest, RequestOutput

Says = Callable[..., Any]


@pytest.mark.parametrize(
    ("fields", "bundled"),
    [
        ({}, True),
        ({"logprobs": 1}, True),
        ({"n": 2, "temperature": 1.0}, True),
        ({"stream": True}, False),
        ({"stop": ["z"]}, False),
        ({"return_token_kinds": True}, False),
    ],
)
def test_only_answers_that_nobody_reads_on_the_way_come_in_bundles(
    says: Says, fields: dict[str, Any], bundled: bool
) -> None:
    server = says("x")
    assert server.complete(**fields).status_code == 200
    assert {request.bundled for request in server.core.requests} == {bundled}


def test_a_bundle_is_text_and_times_of_all_its_steps(new_server: Callable[..., Any]) -> None:
    def script(request: AddRequest) -> list[RequestOutput]:
        ids, name = tuple("abécd".encode()), request.request_id
        ages = (0.0009, 0.0006, 0.0005, 0.0003, 0.0)
        rest = RequestOutput(request_id=name, new_token_ids=ids[1:], finish_reason="length", ages=ages)
        return [RequestOutput(request_id=name, new_token_ids=ids[:1]), rest]

    server, gaps = new_server(script), list[float]()
    server.engine.metrics.on_next_token = gaps.append
    answer = server.complete(max_tokens=6)
    assert answer.json()["choices"][0]["text"] == "ab\u00e9cd"
    assert answer.json()["usage"]["completion_tokens"] == 6
    # The fake core's clock moves on by a millisecond whenever it is read.
    assert gaps[0] > 0.0
    assert gaps[1:] == pytest.approx([0.0003, 0.0001, 0.0002, 0.0003])
