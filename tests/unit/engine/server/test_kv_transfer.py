"""kv_transfer_params: what reaches the core, what an answer says, and which field is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline_engine.messages import AddRequest, Handoff, RequestOutput

Says = Callable[..., Any]
# What vLLM's routers send to a prefill engine.
DECODE_ELSEWHERE: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
HANDOFF = Handoff(
    transfer_id="ab" * 16, epoch="0f.3", namespace="cd" * 32, num_tokens=512, num_chunks=2, expires_at=1e9
)
LENT: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "ab" * 16, "epoch": "0f.3",
    "namespace": "cd" * 32, "num_tokens": 512, "num_chunks": 2, "expires_at": 1e9,
}  # fmt: skip


def one_token(request: AddRequest) -> list[RequestOutput]:
    return [RequestOutput(request_id=request.request_id, new_token_ids=(65,), finish_reason="length", handoff=HANDOFF)]


@pytest.mark.parametrize("chat", [False, True])
def test_a_prefill_computes_one_token_and_says_what_is_lent(new_server: Says, chat: bool) -> None:
    server = new_server(one_token, lends=True)
    ask = server.chat if chat else server.complete
    answer = ask(kv_transfer_params=DECODE_ELSEWHERE, max_tokens=9, min_tokens=4).json()
    (sent,) = server.core.requests
    assert (sent.lends, sent.handoff, sent.sampling.max_tokens, sent.sampling.min_tokens) == (True, None, 1, 1)
    assert answer["kv_transfer_params"] == LENT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_answer_that_ended_with_its_first_token_needs_no_other_engine(new_server: Says) -> None:
    server = new_server(one_token, lends=True)
    assert "kv_transfer_params" not in server.complete(kv_transfer_params=DECODE_ELSEWHERE, stop="A").json()


def test_a_decode_repeats_what_was_lent(new_server: Says) -> None:
    server = new_server(one_token)
    server.complete(kv_transfer_params=LENT, max_tokens=9)
    (sent,) = server.core.requests
    assert (sent.lends, sent.handoff, sent.sampling.max_tokens) == (False, HANDOFF, 9)


def test_one_lease_is_for_one_load(new_server: Says) -> None:
    server = new_server(one_token)
    server.complete(kv_transfer_params=LENT, n=3)
    assert [sent.handoff for sent in server.core.requests] == [HANDOFF, None, None]


def test_parameters_that_ask_for_nothing_change_nothing(new_server: Says) -> None:
    server = new_server(one_token)
    server.complete(kv_transfer_params={"do_remote_decode": False}, max_tokens=9)
    server.complete(kv_transfer_params=None, max_tokens=9)
    assert [(sent.lends, sent.handoff, sent.sampling.max_tokens) for sent in server.core.requests] == [
        (False, None, 9)
    ] * 2


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LENT.items() if key != name}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": 1}}, "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params.remote_host"),
        ({"kv_transfer_params": {"wish": 1}}, "kv_transfer_params.wish"),
        ({"kv_transfer_params": LENT | {"do_remote_decode": True}}, "kv_transfer_params.do_remote_prefill"),
        ({"kv_transfer_params": DECODE_ELSEWHERE | {"epoch": "0f.3"}}, "kv_transfer_params.epoch"),
        *(({"kv_transfer_params": without(name)}, f"kv_transfer_params.{name}") for name in HANDOFF.__struct_fields__),
        ({"kv_transfer_params": LENT | {"epoch": "../x"}}, "kv_transfer_params.epoch"),
        ({"kv_transfer_params": LENT | {"transfer_id": "A" * 32}}, "kv_transfer_params.transfer_id"),
        ({"kv_transfer_params": LENT | {"transfer_id": "a" * 65}}, "kv_transfer_params.transfer_id"),
        ({"kv_transfer_params": LENT | {"num_chunks": 0}}, "kv_transfer_params.num_chunks"),
        ({"kv_transfer_params": LENT | {"expires_at": -1.0}}, "kv_transfer_params.expires_at"),
        ({"kv_transfer_params": DECODE_ELSEWHERE, "stream": True}, "stream"),
        ({"kv_transfer_params": DECODE_ELSEWHERE, "n": 2}, "n"),
        ({"kv_transfer_params": DECODE_ELSEWHERE, "prompt": ["a", "b"]}, "prompt"),
        ({"kv_transfer_params": LENT, "prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(new_server: Says, fields: dict[str, Any], param: str) -> None:
    server = new_server(one_token, lends=True)
    response = server.complete(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not server.core.requests


def test_an_engine_whose_kv_nobody_else_reaches_refuses_to_lend(new_server: Says) -> None:
    response = new_server(one_token).complete(kv_transfer_params=DECODE_ELSEWHERE)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "kv_transfer_params.do_remote_decode")
    assert "--kv-store-config" in error["message"]
