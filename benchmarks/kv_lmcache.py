"""LMCache's memory and disk backends as peers, driven without a GPU in a process and an environment of their own.

    uv venv .build/lmcache --python 3.11
    uv pip install --python .build/lmcache/bin/python --no-deps lmcache==0.5.6
    uv pip install --python .build/lmcache/bin/python -r benchmarks/lmcache.txt

or $LMCACHE_PYTHON. Its remote backends are not measured: the S3 connector names the bucket in the host, which needs a
rewriting proxy and an open server here; its node server hands out shared memory to engines that it knows.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kv_rounds import Action, log
from report import Bar, Report

LMCACHE = "LMCache"
PYTHON = Path(__file__).parent.parent / ".build" / "lmcache" / "bin" / "python"
SCRIPT = Path(__file__).with_name("lmcache_peer.py")


class Lmcache:
    """The peer's process. `reason` says why there is none."""

    def __init__(self) -> None:
        self._python = Path(os.environ.get("LMCACHE_PYTHON") or PYTHON)
        self._process: subprocess.Popen[bytes] | None = None
        self.reason: str | None = None
        self.version: str | None = None
        if not self._python.exists():
            self.reason = f"LMCache is not installed in {self._python.parent.parent}: see benchmarks/kv_lmcache.py"
            return
        answers, theirs = os.pipe()
        # It reports its use to its makers unless it is told not to.
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        command = [str(self._python), str(SCRIPT), str(theirs)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[theirs], env=environment,
        )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(answers, "rb")
        self._hello()

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    def actions(
        self, tier: str, chunk: int, count: int, folder: Path | None = None
    ) -> Callable[[str], dict[str, Action]]:
        """Open a backend with room for `count` such chunks twice: "put" or "get" -> an action on all of them."""
        if self._process is None:
            return lambda _: {}
        self._ask(do="open", tier=tier, chunk=chunk, count=count, folder=str(folder))
        return lambda do: {LMCACHE: lambda: float(self._ask(do=do, tier=tier)["seconds"])}

    def lease_us(self, chunk: int, count: int) -> float | None:
        """Microseconds, p50, of a get from memory that nobody copies out, until it is given back."""
        if self._process is None:
            return None
        self._ask(do="open", tier="memory", chunk=chunk, count=count, folder="")
        return 1e6 * float(self._ask(do="lease", tier="memory")["seconds"])

    def close(self, tier: str) -> None:
        """Close a backend that `actions` opened; its files go."""
        if self._process is not None:
            self._ask(do="close", tier=tier)

    def explain(self, report: Report, case: str, bounds: Mapping[str, float]) -> None:
        """A bar that says why there is no figure, if there is none."""
        if self._process is None:
            report.bars.append(Bar(f"{case}: x {LMCACHE}", None, ">=", bounds[LMCACHE], self.reason))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _hello(self) -> None:
        log.info("starting LMCache")
        try:
            self.version = str(self._ask(do="hello")["version"])
        except RuntimeError as error:
            self.stop()
            self._process, self.reason = None, f"LMCache does not start: {error}"
            log.info("%s", self.reason)

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("its process ended") from None
        line = self._answers.readline()
        answer = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer
