"""One `paceline up` as a process, and questions to what it runs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

EXAMPLES = Path(__file__).parents[2] / "manifests" / "examples"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
START_S, STOP_S = 120.0, 60.0


class Up:
    """One `paceline up --json-lines` and the events it has written so far."""

    def __init__(self, state_dir: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "paceline_cli.main", "up", "--json-lines", *arguments]
        environ = {**os.environ, "PACELINE_STATE_DIR": str(state_dir)}
        # A session of its own, so that signals reach it alone.
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.events: list[dict[str, Any]] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = START_S) -> dict[str, Any]:
        """The next event that is wanted; fails with what happened instead."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"not seen within {timeout_s} s; the last events were {self.events[-8:]}")
            if event is None:
                assert self.process.stderr is not None
                pytest.fail(f"ended with {self.process.wait()}: {self.process.stderr.read()} {self.events[-3:]}")
            self.events.append(event)
            if wanted(event):
                return event

    def wait_ready(self) -> str:
        return self.wait_for(lambda event: event["event"] == "ready")["url"]

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """The process that serves HTTP, not the core under it."""
        (found,) = [
            p for p in self.processes() if "paceline-engine" in " ".join(p.cmdline()) and "serve" in p.cmdline()
        ]
        return found

    def ports(self) -> set[int]:
        family = [psutil.Process(self.process.pid), *self.processes()]
        return {
            connection.laddr.port
            for process in family
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_end(self, timeout_s: float = STOP_S) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        while (event := self._queue.get(timeout=10)) is not None:
            self.events.append(event)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return found


def leaves_nothing(processes: list[psutil.Process], ports: set[int]) -> None:
    until(lambda: not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], "processes end")
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not ports & listening


def ask(url: str, **body: Any) -> Iterator[dict[str, Any]]:
    """Chunks of a streamed chat completion."""
    request = {"model": "smollm2", "messages": QUESTION, "stream": True, "temperature": 0, **body}
    with httpx.stream("POST", f"{url}/chat/completions", json=request, timeout=60) as response:
        response.read() if response.status_code != 200 else None
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


def text_of(chunks: Iterator[dict[str, Any]]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def answers(url: str) -> bool:
    """Whether an engine serves now."""
    with contextlib.suppress(httpx.HTTPError, AssertionError):
        return len(text_of(ask(url, max_tokens=4))) > 0
    return False
