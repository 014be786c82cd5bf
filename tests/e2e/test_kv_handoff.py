"""One engine computes a prompt, another goes on: through a node server, whatever dies in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from engine_process import HTTP, EngineProcess, engine_process, wait_for
from kv_server_process import KVServerProcess, kv_server_process

from paceline_engine.handoffs import Handoffs, open_handoffs
from paceline_engine.messages import AddRequest, RequestOutput, SamplingParams
from paceline_kvstore.config import parse_settings
from paceline_kvstore.opening import open_store

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(300)]
# Chunks of 256 tokens: two whole ones, and a part of a third that the decode engine computes.
PROMPT = {"model": "m", "prompt": [1000 + 7 * i % 4001 for i in range(700)], "max_tokens": 12, "temperature": 0}
PREFILL = PROMPT | {"kv_transfer_params": {"do_remote_decode": True}}


def engine_on(directory: Path, stack: ExitStack, server: KVServerProcess, *options: str) -> EngineProcess:
    """An engine whose only tier is the node server."""
    directory.mkdir()
    settings = directory / "kv.json"
    settings.write_text(json.dumps({"node": {"address": f"unix://{server.socket}"}, "reuse": "always"}))
    arguments = ("--device", "cpu", "--max-model-len", "1024", "--kv-store-config", str(settings), *options)
    return stack.enter_context(engine_process(directory, *arguments))


def node_server(directory: Path, stack: ExitStack) -> KVServerProcess:
    """With room for the chunks of a test, of 12 MB each, half of which may be pinned."""
    settings = directory / "server.json"
    settings.write_text(json.dumps({"memory": {"capacity": "256Mi"}}))
    return stack.enter_context(kv_server_process(directory, "--max-chunk", "16Mi", config=settings))


def details(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]


def text(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["text"]


def pinned(server: KVServerProcess) -> int:
    return server.ask("GET", "/admin/stats").json()["pinned"]["count"]


def outcomes(engine: EngineProcess) -> list[str]:
    answer = HTTP.get(f"{engine.admin}/admin/explain").json()
    return [f"{entry['side']} {entry['outcome']}" for entry in answer["handoffs"]]


def test_a_prompt_computed_by_one_engine_is_continued_by_another(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = node_server(tmp_path, stack)
        prefill = engine_on(tmp_path / "prefill", stack, server)
        decode = engine_on(tmp_path / "decode", stack, server)
        alone = prefill.post(PROMPT | {"cache_salt": "alone"})
        first = prefill.post(PREFILL)
        lent = first.json()["kv_transfer_params"]
        assert (lent["num_chunks"], lent["num_tokens"], lent["do_remote_prefill"]) == (2, 512, True)
        assert first.json()["usage"]["completion_tokens"] == 1
        assert text(alone).startswith(text(first))
        assert pinned(server) == 2

        going_on = decode.post(PROMPT | {"kv_transfer_params": lent})
        assert details(going_on) == {"cached_tokens": 512, "cached_tokens_by_tier": {"device": 0, "node": 512}}
        assert text(going_on) == text(alone)
        wait_for("the lease ended", lambda: pinned(server) == 0)
        assert (outcomes(prefill), outcomes(decode)) == (["prefill lent"], ["decode honoured"])

        # The lease is over, and a lease is for one engine.
        salted = PROMPT | {"cache_salt": "again"}
        lent = prefill.post(salted | PREFILL | {"cache_salt": "again"}).json()["kv_transfer_params"]
        wrong = decode.post(salted | {"kv_transfer_params": lent | {"namespace": "ab" * 32}})
        assert HTTP.post(f"{prefill.admin}/reset_prefix_cache").status_code == 200
        wait_for("leases ended", lambda: pinned(server) == 0)
        stale = decode.post(PROMPT | {"cache_salt": "other", "kv_transfer_params": lent})
        for computed in (wrong, stale):
            assert details(computed)["cached_tokens"] == 0
            assert text(computed) == text(alone)
        assert outcomes(decode)[1:] == ["decode namespace", "decode lease"]
        exposed = HTTP.get(f"{decode.metrics}/metrics").text
        assert 'paceline_engine_kv_handoffs_total{model_name="m",outcome="namespace",side="decode"} 1.0' in exposed


def test_neither_a_killed_prefill_engine_nor_a_dead_server_fails_a_request(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = node_server(tmp_path, stack)
        prefill = engine_on(tmp_path / "prefill", stack, server)
        decode = engine_on(tmp_path / "decode", stack, server)
        alone = decode.post(PROMPT | {"cache_salt": "alone"})
        lent = [
            prefill.post(PREFILL | {"cache_salt": salt}).json()["kv_transfer_params"] for salt in ("first", "second")
        ]
        prefill.close()
        # What was lent is in the server, and the engine that lent it isn't asked.
        going_on = decode.post(PROMPT | {"cache_salt": "first", "kv_transfer_params": lent[0]})
        assert (details(going_on)["cached_tokens"], text(going_on)) == (512, text(alone))
        server.close()
        lost = decode.post(PROMPT | {"cache_salt": "second", "kv_transfer_params": lent[1]})
        assert (details(lost)["cached_tokens"], text(lost)) == (0, text(alone))
        assert outcomes(decode) == ["decode honoured", "decode lease"]
        # Nor does a prefill engine need the server to answer.
        unlent = decode.post(PREFILL | {"cache_salt": "third"})
        assert unlent.status_code == 200
        assert "kv_transfer_params" not in unlent.json()


class Copier:
    """Chunks of 4 KiB."""

    def num_bytes(self, num_tokens: int) -> int:
        return 4096

    def read_later(self, block_ids: Sequence[int], num_tokens: int) -> Callable[[], bytes]:
        return lambda: bytes(4096)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def handoffs_on(stack: ExitStack, server: KVServerProcess) -> Handoffs:
    store = open_store(parse_settings({"node": {"address": f"unix://{server.socket}"}}))
    made = open_handoffs(store, Copier(), bytes.fromhex("ab" * 32), 256, lease_s=1.0)
    stack.callback(store.close)
    stack.callback(made.close)
    return made


def test_a_storm_of_cut_hand_offs_leaves_no_lease_in_the_server(tmp_path: Path, stack: ExitStack) -> None:
    """200 of them: the client leaves before or after the answer, decode never comes, or its engine is killed."""
    server = stack.enter_context(kv_server_process(tmp_path))
    prefill, decode, killed = (handoffs_on(stack, server) for _ in range(3))
    # An engine that is killed gives nothing back.
    killed.borrower.release = lambda request_id: None  # type: ignore[method-assign]
    dice, most, num_lent = Random(3), 0, 0
    for number in range(200):
        name, cut = str(number), dice.choice(("waiting", "answered", "arrived", "done", "killed"))
        chain = [bytes([number % 16, index]) * 16 for index in range(3)]
        assert prefill.lender is not None
        prefill.lender.lend(name, chain, range(48), 10.0)
        answers = prefill.settled([RequestOutput(request_id=name, finish_reason="length")], is_last=False)
        if cut == "waiting":
            prefill.aborted(name)
            continue
        answers = answers or wait_for("an answer", lambda: prefill.settled((), is_last=False))
        handoff = answers[0].handoff
        assert handoff is not None
        num_lent += 1
        if cut != "answered":
            engine = killed if cut == "killed" else decode
            sampling = SamplingParams(max_tokens=1)
            engine.arrived(AddRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling, handoff=handoff))
            if cut != "arrived":
                assert wait_for("a verdict", lambda engine=engine, name=name: engine.borrower.verdict(name))
            engine.settled([RequestOutput(request_id=name, finish_reason="length")], is_last=False)
        most = max(most, pinned(server))
    assert most > 0
    assert num_lent > 100
    wait_for("no lease", lambda: pinned(server) == 0)
    wait_for("none known", lambda: prefill.leases["prefill"] == decode.leases["decode"] == 0)
