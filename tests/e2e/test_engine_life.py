"""Life and death of the engine's two processes: stalls, signals, drains, kills."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
from engine_process import DEADLINE, HTTP, LONG, SMOLLM2, EngineProcess, Running, engine_process, wait_for


def test_a_killed_core_ends_requests_turns_live_and_exits(slow: EngineProcess) -> None:
    running = Running(slow)
    slow.core.kill()
    wait_for(
        "not live", lambda: slow.popen.poll() is not None or HTTP.get(f"{slow.http}/health/live").status_code == 503
    )
    lines = running.join()
    assert lines[-1] == "data: [DONE]"
    assert "killed by signal 9" in json.loads(lines[-2][6:])["error"]["message"]
    assert slow.wait_exit() == 1
    assert slow.log.read_text().count("the engine core was killed by signal 9") == 1


def test_a_stalled_core_turns_live_503_and_back(tmp_path: Path) -> None:
    with engine_process(tmp_path, "--device", "simulated", "--progress-timeout", "2s") as engine:
        core = engine.core
        core.send_signal(signal.SIGSTOP)
        answer = wait_for("not live", lambda: (r := HTTP.get(f"{engine.http}/health/live")).status_code == 503 and r)
        assert "no progress" in answer.json()["reason"]
        assert HTTP.get(f"{engine.http}/health/ready").status_code == 503
        core.send_signal(signal.SIGCONT)
        wait_for("live", lambda: HTTP.get(f"{engine.http}/health/live").status_code == 200)


def test_sigterm_finishes_what_runs_and_refuses_what_comes(slow: EngineProcess) -> None:
    core = slow.core
    running = Running(slow, max_tokens=100)
    slow.popen.terminate()
    wait_for("draining", lambda: slow.load()["draining"])
    refused = slow.post(LONG)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert HTTP.get(f"{slow.http}/health/ready").status_code == 503
    assert HTTP.get(f"{slow.http}/health/live").status_code == 200
    lines = running.join()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert slow.wait_exit() == 0
    assert not core.is_running()


def test_a_drain_deadline_ends_what_still_runs_with_an_error(tmp_path: Path) -> None:
    options = ("--device", "simulated", "--simulated-alpha-ms", "20", "--drain-timeout", "200ms")
    with engine_process(tmp_path, *options) as engine:
        running = Running(engine)
        engine.popen.terminate()
        lines = running.join()
        assert json.loads(lines[-2][6:])["error"]["code"] == "aborted"
        assert engine.wait_exit() == 1


def test_a_second_signal_stops_at_once(slow: EngineProcess) -> None:
    core = slow.core
    Running(slow)
    slow.popen.terminate()
    wait_for("draining", lambda: slow.load()["draining"])
    slow.popen.send_signal(signal.SIGINT)
    assert slow.wait_exit(20) == 1
    assert not core.is_running()


def test_the_drain_command_waits_for_what_runs(slow: EngineProcess) -> None:
    running = Running(slow, max_tokens=60)
    port = slow.admin.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "paceline_engine.cli", "drain", "--admin-port", port, "--timeout", "30s"]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=DEADLINE, check=False).returncode == 0
    assert running.join()[-1] == "data: [DONE]"
    assert slow.load().items() >= {"draining": True, "in_flight": 0}.items()
    assert HTTP.get(f"{slow.http}/health/ready").json()["state"] == "draining"


def test_kill_9_of_the_api_process_leaves_no_core_and_no_files(slow: EngineProcess) -> None:
    core = slow.core
    sockets = [Path(word.removeprefix("ipc://")) for word in core.cmdline() if word.startswith("ipc://")]
    slow.popen.kill()
    slow.popen.wait()
    wait_for("the core is gone", lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE, 10)
    assert len(sockets) == 2
    assert not any(path.parent.exists() for path in sockets)


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "paceline_engine.cli",
        "serve",
        "--admin-port",
        "0",
        "--metrics-port",
        "0",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)


def test_a_busy_port_is_one_line_with_the_port_and_exit_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_serve("--model", SMOLLM2, "--device", "simulated", "--port", str(port))
    assert result.returncode == 2
    assert f"port {port} on 127.0.0.1 is already in use" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not [child for child in psutil.process_iter(["cmdline"]) if str(port) in (child.info["cmdline"] or [])]
