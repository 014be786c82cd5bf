"""What a client sees through the router: streams, answers, refusals, and what reaches the engine."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import openai
import pytest
from router_harness import DEADLINE_S, TOKEN, Cluster, FakeEngine, Replica, RunningRouter, event, wait_until, word

StartEngine = Callable[..., FakeEngine]
StartRouter = Callable[..., RunningRouter]


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]


def test_a_stream_arrives_byte_for_byte(router: RunningRouter):
    response = router.ask()
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.content == b"".join(
        (
            event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
            *(word(text) for text in ("Paris", " is", " it")),
            b"data: [DONE]\n\n",
        )
    )


def test_the_router_asks_for_usage_and_shows_it_only_to_those_who_asked(router: RunningRouter, engine: FakeEngine):
    assert '"completion_tokens"' not in router.ask().text
    assert json.loads(engine.seen[-1].body)["stream_options"] == {"include_usage": True}
    assert '"completion_tokens"' in router.ask(stream_options={"include_usage": True}).text
    router.ask(stream_options={"include_usage": False})
    assert json.loads(engine.seen[-1].body)["stream_options"] == {"include_usage": False}
    router.ask(stream=False)
    assert "stream_options" not in json.loads(engine.seen[-1].body)


def test_the_openai_client_streams_and_asks_whole(router: RunningRouter, engine: FakeEngine):
    with openai.OpenAI(base_url=router.url + "/v1", api_key="sk-alice", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        stream = client.chat.completions.create(model="chat", messages=messages, stream=True)
        assert "".join(part.choices[0].delta.content for part in stream if part.choices) == "Paris is it"
        engine.mode = "whole"
        answer = client.chat.completions.create(model="chat", messages=messages)
        assert answer.choices[0].message.content == "Paris is it"
        assert [model.id for model in client.models.list()] == ["chat"]
        with pytest.raises(openai.NotFoundError, match="there is: chat"):
            client.chat.completions.create(model="other", messages=messages)


def test_the_openai_client_asks_for_embeddings(router: RunningRouter, engine: FakeEngine):
    engine.mode = "embedding"
    with openai.OpenAI(base_url=router.url + "/v1", api_key="sk-alice", max_retries=0) as client:
        answer = client.embeddings.create(model="chat", input=["hi", "there"], dimensions=2)
        assert answer.data[0].embedding == [1.0, 1.0]
        assert answer.usage.total_tokens == 3
        seen = engine.seen[-1]
        assert seen.path == "/v1/embeddings"
        assert json.loads(seen.body) == {
            "model": "chat", "input": ["hi", "there"], "dimensions": 2, "encoding_format": "base64",
        }  # fmt: skip
        assert len(seen.headers["x-paceline-salt"]) == 64
        with pytest.raises(openai.NotFoundError, match="there is: chat"):
            client.embeddings.create(model="other", input="hi")
    labels = {"tenant": "alice", "model_name": "chat", "code": "200"}
    assert router.metric("paceline_router_requests_total", **labels) >= 1


def test_on_this_machine_the_openai_client_needs_no_real_key_until_a_tenant_has_one(
    cluster: Cluster, engine: FakeEngine, start_router: StartRouter
):
    cluster.service("chat")
    cluster.router(anonymousTenant="guest")
    cluster.tenant("guest")
    cluster.endpoints("chat", engine.replica())
    router = start_router()
    wait_until(lambda: router.process.discovery.snapshot.models["chat"].serving, "the endpoint is known")
    engine.mode = "whole"
    with openai.OpenAI(base_url=router.url + "/v1", api_key="unused", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        assert client.chat.completions.create(model="chat", messages=messages).choices
        assert [model.id for model in client.models.list()] == ["chat"]
        cluster.tenant("alice", "sk-alice")
        wait_until(
            lambda: router.ask("sk-alice", stream=False).status_code == 200 and router.ask("x").status_code == 401,
            "alice has a key",
        )
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="chat", messages=messages)
    assert router.ask(None, stream=False).status_code == 200


def test_events_are_passed_on_as_they_come(router: RunningRouter, engine: FakeEngine):
    engine.mode = "held"
    with router.streaming() as response:
        lines = response.iter_lines()
        assert "one" in next(lines)
        assert router.in_flight == 1
        engine.release()
        assert any("two" in line for line in lines)
    wait_until(lambda: router.in_flight == 0, "in-flight is back to zero")


def test_what_reaches_the_engine(router: RunningRouter, engine: FakeEngine):
    body = b'{"model": "chat",   "stream": false, "x": "\xc3\xa9"}'
    headers = {
        "authorization": "Bearer sk-alice",
        "x-request-id": "mine-1",
        "traceparent": "00-a-b-01",
        "x-paceline-salt": "chosen",
        "x-paceline-tenant": "another",
        "X-Paceline-Priority": "100",
        "cookie": "a=b",
        "connection": "keep-alive, x-private",
        "x-private": "1",
    }
    response = router.client.post("/v1/completions", content=body, headers=headers)
    seen = engine.seen[0]
    assert (seen.path, seen.body) == ("/v1/completions", body)
    assert seen.headers["authorization"] == f"Bearer {TOKEN}"
    assert seen.headers["x-request-id"] == response.headers["x-request-id"] == "mine-1"
    assert seen.headers["traceparent"] == "00-a-b-01"
    assert seen.headers["content-length"] == str(len(body))
    assert len(seen.headers["x-paceline-salt"]) == 64
    assert seen.headers["x-paceline-tenant"] == "alice"
    assert not {"cookie", "x-private", "x-paceline-priority"} & set(seen.headers)


def test_what_reaches_the_client(router: RunningRouter):
    headers = router.ask().headers
    assert headers["x-kept"] == "yes"
    assert len(headers["x-request-id"]) == 32
    assert not {"x-paceline-load", "x-hop"} & set(headers)


def test_the_salt_is_the_tenants_own_and_stable(router: RunningRouter, cluster: Cluster, engine: FakeEngine):
    cluster.tenant("bob", "sk-bob")
    wait_until(lambda: router.ask("sk-bob").status_code == 200, "bob is known")
    engine.seen.clear()
    for key in ("sk-alice", "sk-bob", "sk-alice"):
        router.ask(key)
    alice, bob, again = (seen.headers["x-paceline-salt"] for seen in engine.seen)
    assert alice == again != bob


def test_a_rotated_internal_token_is_picked_up(router: RunningRouter, engine: FakeEngine, token_file):
    token_file.write_text("rotated")

    def sent() -> bool:
        router.ask()
        return engine.seen[-1].headers["authorization"] == "Bearer rotated"

    wait_until(sent, "the new token is used")


def test_an_encoded_answer_passes_untouched(router: RunningRouter, engine: FakeEngine):
    engine.mode = "encoded"
    response = router.ask(stream=False)
    assert response.headers["content-encoding"] == "gzip"
    assert response.content == b"{}" or gzip.decompress(response.content) == b"{}"
    assert engine.seen[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        ('{"model": "chat"}'.encode("utf-16"), "not valid JSON"),
        (b'{"stream": true}', "name a model"),
        (b'{"model": 7}', "name a model"),
    ],
)
def test_a_bad_body_is_a_400(router: RunningRouter, body: bytes, message: str):
    response = router.client.post("/v1/completions", content=body, headers={"authorization": "Bearer sk-alice"})
    assert response.status_code == 400
    assert message in error_of(response)["message"]
    assert response.headers["x-request-id"]


def test_an_unknown_model_is_a_404_that_lists_what_there_is(router: RunningRouter):
    error = error_of(router.ask(model="gpt"))
    assert error["code"] == "model_not_found"
    assert error["message"] == "the model 'gpt' does not exist; there is: chat"


def test_wrong_paths_and_methods_are_openai_errors(router: RunningRouter):
    assert error_of(router.client.get("/v1/files"))["code"] == "not_found"
    response = router.client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"


def test_twenty_megabytes_pass_and_the_limit_is_a_clean_413(
    router: RunningRouter, cluster: Cluster, engine: FakeEngine
):
    image = "x" * 20_000_000
    assert router.ask(image=image).status_code == 200
    assert len(engine.seen[-1].body) > 20_000_000
    cluster.router(maxBodyBytes=1_000_000)
    wait_until(lambda: router.process.discovery.snapshot.router.max_body_bytes == 1_000_000, "the bound is known")
    response = router.ask(image=image)
    assert response.status_code == 413
    assert "larger than 1000000 bytes" in error_of(response)["message"]


def test_a_body_of_undeclared_length_is_bounded_too(router: RunningRouter, cluster: Cluster):
    cluster.router(maxBodyBytes=1_000_000)
    wait_until(lambda: router.process.discovery.snapshot.router.max_body_bytes == 1_000_000, "the bound is known")
    pieces = (b"x" * 100_000 for _ in range(20))
    response = router.client.post("/v1/completions", content=pieces, headers={"authorization": "Bearer sk-alice"})
    assert response.status_code == 413


def test_a_body_that_never_arrives_is_a_408(cluster: Cluster, start_router: StartRouter):
    cluster.tenant("alice", "sk-alice")
    router = start_router(body_timeout_s=0.2)
    with socket.create_connection(router.listeners.http.getsockname()) as connection:
        connection.settimeout(DEADLINE_S)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-alice\r\ncontent-length: 9\r\n\r\n{"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_an_engines_own_refusal_reaches_the_client(router: RunningRouter, engine: FakeEngine):
    engine.mode = "error"
    response = router.ask()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "too_large"
    assert router.metric(
        "paceline_router_slo_requests_total", tenant="alice", model_name="chat", outcome="excluded"
    ) == 1  # fmt: skip


def test_a_refused_internal_token_is_our_failure_not_the_clients(router: RunningRouter, engine: FakeEngine, caplog):
    engine.mode = "refused"
    response = router.ask()
    assert response.status_code == 502
    assert "refused the internal token" in caplog.text


def test_a_service_without_engines_is_a_503_with_retry_after(cluster: Cluster, router: RunningRouter):
    cluster.service("empty")
    wait_until(lambda: "empty" in router.process.discovery.snapshot.models, "the service is known")
    response = router.ask(model="empty")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "no engine of empty is ready" in error_of(response)["message"]


def test_more_requests_than_the_bound_are_refused(
    cluster: Cluster, start_engine: StartEngine, start_router: StartRouter
):
    engine = start_engine(mode="held")
    cluster.service("chat")
    cluster.tenant("alice", "sk-alice")
    cluster.endpoints("chat", engine.replica())
    router = start_router(max_requests=1)
    with router.streaming() as first:
        lines = first.iter_lines()
        next(lines)
        assert "1 requests open" in error_of(router.ask())["message"]


# Several replicas.


@pytest.fixture
def pair(
    cluster: Cluster, start_engine: StartEngine, start_router: StartRouter
) -> tuple[RunningRouter, list[FakeEngine]]:
    engines = [start_engine(), start_engine()]
    cluster.service("chat")
    cluster.tenant("alice", "sk-alice")
    cluster.endpoints("chat", *(engine.replica(f"engine-{index}") for index, engine in enumerate(engines)))
    router = start_router()
    wait_until(lambda: len(router.process.discovery.snapshot.models["chat"].serving) == 2, "both are known")
    return router, engines


def test_requests_spread_evenly(pair):
    router, engines = pair
    for _ in range(10):
        assert router.ask().status_code == 200
    assert [len(engine.seen) for engine in engines] == [5, 5]


def test_a_busy_replica_gets_less(pair):
    router, engines = pair
    engines[0].mode = engines[1].mode = "held"
    with router.streaming() as first:
        lines = first.iter_lines()
        next(lines)
        held, idle = sorted(engines, key=lambda engine: engine.active, reverse=True)
        idle.mode = "stream"
        for _ in range(6):
            assert router.ask().status_code == 200
        assert (len(held.seen), len(idle.seen)) == (1, 6)


def test_a_draining_engines_503_is_retried_elsewhere(pair):
    router, engines = pair
    engines[0].mode = "busy"
    assert [router.ask().status_code for _ in range(6)] == [200] * 6
    assert len(engines[0].seen) >= 1
    assert router.metric("paceline_router_upstream_errors_total", model_name="chat", reason="busy") >= 1


def test_a_dead_replica_costs_no_request_and_rests(pair):
    router, engines = pair
    engines[0].ask_to_stop()
    engines[0].wait_stopped()
    assert [router.ask().status_code for _ in range(6)] == [200] * 6
    assert router.metric("paceline_router_upstream_errors_total", model_name="chat", reason="connect") == 1


def test_when_all_are_draining_the_client_is_told_to_come_back(pair):
    router, engines = pair
    engines[0].mode = engines[1].mode = "busy"
    response = router.ask()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert [len(engine.seen) for engine in engines] == [1, 1]


def test_when_none_can_be_reached_it_is_a_502(cluster: Cluster, router: RunningRouter):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = listener.getsockname()[1]
    cluster.endpoints("chat", Replica("gone-0", dead))
    wait_until(lambda: router.process.discovery.snapshot.models["chat"].serving[0].id.port == dead, "it is known")
    response = router.ask()
    assert response.status_code == 502
    assert "did not answer (connect)" in error_of(response)["message"]


def test_terminating_and_unready_replicas_get_no_new_requests(pair, cluster: Cluster):
    router, engines = pair
    cluster.endpoints(
        "chat", engines[0].replica("engine-0", terminating=True), engines[1].replica("engine-1")
    )  # fmt: skip
    wait_until(lambda: len(router.process.discovery.snapshot.models["chat"].serving) == 1, "one is terminating")
    assert [router.ask().status_code for _ in range(4)] == [200] * 4
    assert [len(engine.seen) for engine in engines] == [0, 4]
    rows = {row["pod"]: row for row in router.admin("/admin/endpoints").json()["endpoints"]}
    assert rows["engine-0"]["draining"] and not rows["engine-1"]["draining"]
    cluster.endpoints("chat", engines[1].replica("engine-1", ready=False))
    wait_until(lambda: router.ask().status_code == 503, "none is ready")


# Ends of all kinds.


@pytest.mark.parametrize("mode", ["dies", "truncated"])
def test_a_stream_that_breaks_off_ends_with_an_error_event(router: RunningRouter, engine: FakeEngine, mode: str):
    engine.mode = mode
    response = router.ask()
    assert response.status_code == 200
    assert json.loads(events(response)[-1])["error"]["code"] == "upstream_failed"
    assert router.metric("paceline_router_upstream_errors_total", model_name="chat", reason="broken_off") == 1
    wait_until(
        lambda: router.metric(
            "paceline_router_slo_requests_total", tenant="alice", model_name="chat", outcome="error"
        ) == 1,
        "it is judged an error",
    )  # fmt: skip
    assert len(engine.seen) == 1, "a request whose answer had begun is never repeated"
    assert router.in_flight == 0


def test_the_openai_client_raises_when_a_stream_breaks_off(router: RunningRouter, engine: FakeEngine):
    engine.mode = "dies"
    with openai.OpenAI(base_url=router.url + "/v1", api_key="sk-alice", max_retries=0) as client:
        stream = client.chat.completions.create(model="chat", messages=[], stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            list(stream)


def test_a_client_that_leaves_closes_the_upstream(router: RunningRouter, engine: FakeEngine):
    engine.mode = "held"
    with router.streaming() as response:
        lines = response.iter_lines()
        next(lines)
    wait_until(lambda: engine.seen[0].closed_s, "the engine sees the close")
    wait_until(lambda: router.in_flight == 0, "in-flight is back to zero")
    wait_until(
        lambda: router.metric("paceline_router_requests_total", tenant="alice", model_name="chat", code="499") == 1,
        "it is counted",
    )


def test_a_client_that_leaves_before_the_first_byte_closes_the_upstream_too(router: RunningRouter, engine: FakeEngine):
    engine.mode = "silent"
    with socket.create_connection(router.listeners.http.getsockname()) as connection:
        body = b'{"model": "chat", "stream": true}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-alice\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_until(lambda: engine.active, "the engine has it")
    wait_until(lambda: engine.seen[0].closed_s, "the engine sees the close")
    wait_until(lambda: router.in_flight == 0 and router.process.proxy.open_requests == 0, "nothing is left")


def test_a_client_that_stops_reading_is_let_go(cluster: Cluster, start_engine: StartEngine, start_router: StartRouter):
    engine = start_engine(mode="endless")
    cluster.service("chat")
    cluster.tenant("alice", "sk-alice")
    cluster.endpoints("chat", engine.replica())
    router = start_router(write_timeout_s=0.3)
    with router.streaming():
        wait_until(lambda: engine.seen and engine.seen[0].closed_s, "the engine is freed")
        wait_until(lambda: router.in_flight == 0, "in-flight is back to zero")


def test_accounting_returns_to_zero_after_32_streams_of_all_kinds(pair):
    router, engines = pair
    engines[0].delay_s = 0.01
    modes = ("stream", "dies", "truncated", "busy", "error", "stream", "whole", "stream")

    def one(index: int) -> int:
        engines[index % 2].mode = modes[index % len(modes)]
        if index % 5 == 0:
            with router.streaming() as response:
                next(response.iter_lines(), None)
                return response.status_code
        return router.ask().status_code

    with ThreadPoolExecutor(32) as pool:
        codes = list(pool.map(one, range(96)))
    assert set(codes) <= {200, 400, 503}
    wait_until(lambda: router.in_flight == 0 and router.process.proxy.open_requests == 0, "all is at rest")
    assert not router.process.proxy.in_flight.counts
    counted = sum(
        sample.value
        for metric in router.process._registry.collect()
        for sample in metric.samples
        if sample.name == "paceline_router_requests_total"
    )
    assert counted == 96, "every request is counted once"


def test_32_streams_at_once_are_all_in_flight_and_all_come_back(router: RunningRouter, engine: FakeEngine):
    engine.mode = "held"
    with ExitStack() as stack:
        responses = [stack.enter_context(router.streaming()) for _ in range(32)]
        assert router.in_flight == 32
        engine.release()
        assert all("two" in "".join(response.iter_text()) for response in responses)
    wait_until(lambda: router.in_flight == 0, "in-flight is back to zero")


def test_stopping_finishes_running_streams_and_takes_no_new_ones(router: RunningRouter, engine: FakeEngine):
    engine.mode = "held"
    with router.streaming() as response:
        lines = response.iter_lines()
        next(lines)
        router.ask_to_stop()
        address = router.listeners.http.getsockname()

        def refused() -> bool:
            try:
                socket.create_connection(address, timeout=1).close()
            except OSError:
                return True
            return False

        wait_until(refused, "the port is closed")
        engine.release()
        assert any("two" in line for line in lines)
    router.wait_stopped()
