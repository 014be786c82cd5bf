"""The engine's two real processes over HTTP: API behaviour on the simulated device, answers on the real model."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_process import DEADLINE, HTTP, LONG, EngineProcess, Running, engine_process, events, wait_for
from prometheus_client.parser import text_string_to_metric_families

from paceline_api.metrics import ENGINE, ENGINE_COMPAT, MetricType
from paceline_cli.commands import explain_request

# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_same_text_as_a_whole_answer(engine: EngineProcess, seed: int) -> None:
    body = {"model": "m", "prompt": f"text {seed} 日本", "max_tokens": 60, "ignore_eos": True}
    whole = engine.post(body).json()
    parts = events(engine.post(body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == whole["choices"][0]["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]][-1] == "length"
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 60


def test_chat_stream_starts_with_the_role_and_has_no_usage_unless_asked(engine: EngineProcess) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
    parts = events(engine.post(body, "/v1/chat/completions"))
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in part["choices"][0]["delta"] for part in parts[1:])
    assert not any("usage" in part for part in parts)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_is_not_leaked(engine: EngineProcess, stream: bool) -> None:
    body = {"model": "m", "prompt": "stop here", "max_tokens": 40, "ignore_eos": True}
    full = engine.post(body).json()["choices"][0]["text"]
    stop = full[len(full) // 2 :][:5]
    response = engine.post(body | {"stop": [stop, "never said"], "stream": stream})
    choices = [part["choices"][0] for part in (events(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == full[: full.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    engine.wait_idle()


def test_several_prompts_are_several_choices(engine: EngineProcess) -> None:
    prompts = ["alpha", "beta", "gamma"]
    body = {"model": "m", "max_tokens": 10, "ignore_eos": True}
    alone = [engine.post(body | {"prompt": prompt}).json()["choices"][0]["text"] for prompt in prompts]
    together = engine.post(body | {"prompt": prompts}).json()
    assert [choice["text"] for choice in together["choices"]] == alone
    assert together["usage"]["completion_tokens"] == 30
    streamed = ["", "", ""]
    for part in events(engine.post(body | {"prompt": prompts, "stream": True})):
        for choice in part["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == alone


def test_token_ids_are_a_prompt_and_stop_token_ids_end_it(engine: EngineProcess) -> None:
    body = {"model": "m", "prompt": [504, 2025, 282], "max_tokens": 5, "ignore_eos": True}
    usage = engine.post(body).json()["usage"]
    assert usage | {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8} == usage
    assert engine.post(body | {"prompt": [[1], [2, 3]]}).json()["usage"]["prompt_tokens"] == 3


def test_the_openai_client_works_unchanged(engine: EngineProcess) -> None:
    with openai.OpenAI(base_url=f"{engine.http}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["m"]
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        whole = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=9, seed=1)
        assert whole.usage is not None
        assert whole.usage.completion_tokens <= 9
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        parts = list(client.chat.completions.create(model="m", messages=messages, max_tokens=9, seed=1, **options))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == whole.choices[0].message.content
        assert parts[-1].usage is not None
        # The prompt was cached by then; all else is equal.
        assert parts[-1].usage.model_copy(update={"prompt_tokens_details": None}) == whole.usage.model_copy(
            update={"prompt_tokens_details": None}
        )
        with pytest.raises(openai.BadRequestError, match="top_logprobs") as refused:
            client.chat.completions.create(model="m", messages=messages, top_logprobs=2)
        assert refused.value.param == "top_logprobs"
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.chat.completions.create(model="other", messages=messages)


def test_the_openai_client_gets_embeddings(engine: EngineProcess) -> None:
    with openai.OpenAI(base_url=f"{engine.http}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="m", input=["one", "two", "one"])
        assert [item.index for item in answer.data] == [0, 1, 2]
        vectors = [item.embedding for item in answer.data]
        assert vectors[0] == vectors[2] != vectors[1]
        assert sum(value * value for value in vectors[0]) == pytest.approx(1.0, abs=1e-5)
        plain = client.embeddings.create(model="m", input="one", encoding_format="float").data[0].embedding
        assert plain == pytest.approx(vectors[0], abs=1e-7)
        assert len(client.embeddings.create(model="m", input=[[504, 2025]], dimensions=5).data[0].embedding) == 5
        with pytest.raises(openai.BadRequestError, match="input\\[1\\] is empty") as refused:
            client.embeddings.create(model="m", input=["one", ""])
        assert refused.value.param == "input[1]"
    many = engine.post({"model": "m", "input": [[index] for index in range(2048)]}, "/v1/embeddings").json()
    assert len(many["data"]) == 2048
    engine.wait_idle()


# --- refusals ------------------------------------------------------------------------------------------------------


def test_limits_hold_at_the_boundary(engine: EngineProcess) -> None:
    ids = [504] * 2047
    assert engine.post({"model": "m", "prompt": ids, "max_tokens": 1}).json()["usage"]["completion_tokens"] == 1
    for body in ({"prompt": ids, "max_tokens": 2}, {"prompt": [*ids, 504]}, {"prompt": "a " * 3000}, {"prompt": ""}):
        error = engine.post({"model": "m"} | body)
        assert error.status_code == 400
        assert error.json()["error"]["code"] in ("context_length_exceeded", "empty_prompt")
    engine.wait_idle()


@pytest.mark.parametrize("size", [32 * 2**20 + 1, 40 * 2**20])
def test_a_huge_body_is_413(engine: EngineProcess, size: int) -> None:
    response = HTTP.post(f"{engine.http}/v1/completions", content=b" " * size, timeout=DEADLINE)
    assert response.status_code == 413
    assert "32 MiB" in response.json()["error"]["message"]


def test_unknown_paths_and_methods_answer_in_openai_shape(engine: EngineProcess) -> None:
    for response, status in (
        (HTTP.get(f"{engine.http}/v1/x"), 404),
        (HTTP.get(f"{engine.http}/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_request_ids_are_echoed_and_made(engine: EngineProcess) -> None:
    given = HTTP.get(f"{engine.http}/v1/models", headers={"x-request-id": "abc-1"})
    made = HTTP.get(f"{engine.http}/health/live", headers={"x-request-id": "with space"})
    assert given.headers["x-request-id"] == "abc-1"
    assert re.fullmatch(r"[0-9a-f]{32}", made.headers["x-request-id"])


def test_beyond_the_queue_limit_requests_get_503_with_retry_after(tmp_path: Path) -> None:
    options = ("--device", "simulated", "--simulated-alpha-ms", "20", "--max-num-seqs", "1", "--max-num-waiting", "1")
    with engine_process(tmp_path, *options) as engine:
        first = Running(engine, max_tokens=100)
        second = threading.Thread(target=engine.post, args=(LONG | {"max_tokens": 2},))
        second.start()
        wait_for("one waits", lambda: engine.load()["waiting"] == 1)
        refused = engine.post(LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert first.join()[-1] == "data: [DONE]"
        second.join(DEADLINE)
        engine.wait_idle()
        assert engine.post(LONG | {"max_tokens": 1}).status_code == 200


def test_the_command_line_says_what_a_waiting_request_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "simulated", "--simulated-alpha-ms", "20", "--max-num-seqs", "1")
    with engine_process(tmp_path, *options) as engine:
        first = Running(engine, max_tokens=100)
        mine = {"x-request-id": "mine-1"}
        second = threading.Thread(target=engine.post, args=(LONG | {"max_tokens": 2},), kwargs={"headers": mine})
        second.start()
        wait_for("one waits", lambda: engine.load()["waiting"] == 1)
        assert explain_request.run("mine-1", explain_request.Options(engine.admin, None, False)) == 0
        text = capsys.readouterr().out
        assert "mine-1/" in text and "place 1 of 1" in text
        assert "missing: 1 places among the running requests (seqs)" in text
        first.join()
        second.join(DEADLINE)


def test_the_internal_token_guards_all_but_health_and_metrics(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with engine_process(tmp_path, "--device", "simulated", "--internal-token-file", str(token)) as engine:
        for url in (f"{engine.http}/v1/models", f"{engine.admin}/v1/load"):
            assert HTTP.get(url).status_code == 401
            assert HTTP.get(url, headers={"authorization": "Bearer wrong"}).status_code == 401
            assert HTTP.get(url, headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert HTTP.post(f"{engine.admin}/admin/drain").status_code == 401
        for url in (f"{engine.http}/health/live", f"{engine.http}/health/ready", f"{engine.metrics}/metrics"):
            assert HTTP.get(url).status_code == 200


# --- disconnects, metrics ------------------------------------------------------------------------------------------


# Left alone each would run for more than a minute.
ENDLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "streamed": ("/v1/completions", LONG | {"stream": True, "prompt": [504] * 600, "max_tokens": 4000}),
    "whole": ("/v1/completions", LONG | {"prompt": [504] * 600, "max_tokens": 4000}),
    "embeddings": ("/v1/embeddings", {"model": "m", "input": [[index, *[504] * 599] for index in range(1000)]}),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_client_that_goes_away_frees_its_blocks_within_a_second(slow: EngineProcess, kind: str) -> None:
    path, asked = ENDLESS[kind]
    body = json.dumps(asked).encode()
    request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body))
    slow.wait_idle()
    with socket.create_connection(("127.0.0.1", int(slow.http.rsplit(":", 1)[1])), timeout=DEADLINE) as client:
        client.sendall(request + body)
        wait_for("blocks held", lambda: (load := slow.load())["free_blocks"] < load["num_blocks"] - 30)
    # The bound is the promise itself. A step of this engine takes 20 ms; the way there and back some 50 ms.
    wait_for("all blocks free", lambda: (load := slow.load())["free_blocks"] == load["num_blocks"], deadline=1.0)
    assert (load := slow.load())["in_flight"] == load["running"] == load["waiting"] == 0
    scrape = HTTP.get(f"{slow.metrics}/metrics").text
    ended = re.search(r'paceline_engine_requests_total\{finish_reason="abort",model_name="m"\} (\d+)', scrape)
    assert ended is not None and (int(ended[1]) > 1 if kind == "embeddings" else int(ended[1]) == 1)


def test_metrics_are_those_of_the_catalogue_and_add_up(slow: EngineProcess) -> None:
    for _ in range(3):
        assert slow.post(LONG | {"max_tokens": 4}).status_code == 200
    assert slow.post(LONG | {"n": 0}).status_code == 400
    slow.wait_idle()
    families = {
        family.name: family for family in text_string_to_metric_families(HTTP.get(f"{slow.metrics}/metrics").text)
    }
    assert set(families) == {metric.name for metric in ENGINE + ENGINE_COMPAT}
    for metric in ENGINE + ENGINE_COMPAT:
        assert families[metric.name].type == metric.type.value
        if metric.type is not MetricType.HISTOGRAM:
            labels = [set(sample.labels) for sample in families[metric.name].samples]
            assert all(have == set(metric.labels) for have in labels), metric.name

    def value(name: str, **labels: str) -> float:
        samples = [
            s for f in families.values() for s in f.samples if s.name == name and labels.items() <= s.labels.items()
        ]
        return sum(sample.value for sample in samples)

    assert value("paceline_engine_requests_total", finish_reason="length") == 3
    assert value("paceline_engine_requests_rejected_total", reason="invalid") == 1
    assert value("paceline_engine_generation_tokens_total") == value("vllm:generation_tokens_total") == 12
    assert value("vllm:time_to_first_token_seconds_count") == 3
    assert value("vllm:inter_token_latency_seconds_count") == 9
    assert value("vllm:num_requests_running") == value("vllm:kv_cache_usage_perc") == 0


# --- the private port ----------------------------------------------------------------------------------------------


def test_sleep_frees_the_cache_and_serves_nothing_until_woken(slow: EngineProcess) -> None:
    prompt = LONG | {"prompt": [504] * 100, "max_tokens": 1}
    assert slow.post(prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert slow.post(prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert HTTP.post(f"{slow.admin}/reset_prefix_cache").status_code == 200
    assert slow.post(prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    running = Running(slow, max_tokens=50)
    refused = HTTP.post(f"{slow.admin}/sleep")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "refused_by_core")
    running.join()
    slow.wait_idle()
    assert HTTP.post(f"{slow.admin}/sleep").status_code == 200
    wait_for("asleep", lambda: HTTP.get(f"{slow.admin}/is_sleeping").json()["is_sleeping"])
    assert HTTP.get(f"{slow.http}/health/ready").status_code == 503
    assert slow.post(prompt).json()["error"]["code"] == "asleep"
    assert HTTP.post(f"{slow.admin}/wake_up").status_code == 200
    wait_for("awake", lambda: HTTP.get(f"{slow.http}/health/ready").status_code == 200)
    assert slow.post(prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_kv_events_can_be_followed(engine: EngineProcess) -> None:
    load = engine.load()
    with HTTP.stream("GET", f"{engine.admin}/v1/kv-events", timeout=DEADLINE) as response:
        lines = response.iter_lines()
        header = json.loads(next(lines))
        assert (header["epoch"], header["namespace_digest"]) == (load["epoch"], load["namespace_digest"])
        engine.post({"model": "m", "prompt": [7, 8, 9] * 16, "max_tokens": 1})
        found = next(payload for line in lines if (payload := json.loads(line)).get("token_ids", [0])[:3] == [7, 8, 9])
    assert (found["kind"], len(found["block_hashes"]), found["parent_hash"]) == ("stored", 3, None)


def test_a_deadline_that_passes_ends_the_request_with_504(slow: EngineProcess) -> None:
    answer = slow.post(LONG, headers={"x-paceline-deadline-ms": "400"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    slow.wait_idle(20)


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine_process(tmp_path_factory.mktemp("smollm2"), "--device", "cpu", "--max-model-len", "1024") as process:
        yield process


@pytest.mark.engine
def test_the_capital_of_france(smollm2: EngineProcess) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "m", "messages": [question], "max_tokens": 24, "temperature": 0}
    whole = smollm2.post(body, "/v1/chat/completions").json()
    parts = events(smollm2.post(body | {"stream": True}, "/v1/chat/completions"))
    text = whole["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert "<|im_end|>" not in text
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == text


@pytest.mark.engine
def test_embeddings_of_like_texts_are_closer_than_those_of_others(smollm2: EngineProcess) -> None:
    texts = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose by half a percent."]
    with openai.OpenAI(base_url=f"{smollm2.http}/v1", api_key="none", max_retries=0) as client:
        data = client.embeddings.create(model="m", input=texts).data
    first, like, other = (item.embedding for item in data)
    assert len(first) == 576
    assert sum(a * b for a, b in zip(first, like, strict=True)) > sum(a * b for a, b in zip(first, other, strict=True))


@pytest.mark.engine
def test_a_seed_repeats_a_sampled_answer_and_another_differs(smollm2: EngineProcess) -> None:
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5}
    texts = [smollm2.post(body | {"seed": seed}).json()["choices"][0]["text"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.engine
def test_a_schema_shapes_the_answer_whole_and_streamed(smollm2: EngineProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "m", "messages": [question], "max_tokens": 60, "temperature": 0, "response_format": form}
    choice = smollm2.post(body, "/v1/chat/completions").json()["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert set(value) == {"city", "capital"}
    assert isinstance(value["capital"], bool)
    assert choice["finish_reason"] == "stop"
    parts = events(smollm2.post(body | {"stream": True}, "/v1/chat/completions"))
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == choice["message"]["content"]
    cut = smollm2.post(body | {"max_tokens": 4}, "/v1/chat/completions").json()["choices"][0]
    assert (cut["finish_reason"], cut["incomplete"]) == ("length", True)


@pytest.mark.engine
def test_choice_regex_and_grammar_are_kept_and_a_bad_one_is_a_400(smollm2: EngineProcess) -> None:
    body = {"model": "m", "prompt": "Is it so? Answer:", "max_tokens": 12, "temperature": 1.0, "seed": 5}
    for field, form in (
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, r"\d{3}-\d{2}"),
        ({"guided_grammar": 'root ::= "a" [bc]{1,3} "d"'}, r"a[bc]{1,3}d"),
    ):
        choice = smollm2.post(body | field).json()["choices"][0]
        assert re.fullmatch(form, choice["text"]), choice
    refused = smollm2.post(body | {"guided_regex": "a("})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    smollm2.wait_idle()
