"""Benchmark results as files: JSON with machine facts, and a Markdown table beside it.

Shape: {"name", "commit", "date", "machine", "seed", "rows": [{"case", "metric", "unit", "ours", "peer", "peer_name",
"ratio"}], "bars": [{"name", "value", "op", "bound", "holds", "reason"}]}, and what a benchmark adds of its own. A bar
that could not be measured has value None, holds False and a reason.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured quantity, beside a peer's where there is one. `ratio` is ours / peer."""

    case: str
    metric: str
    unit: str
    ours: float | None
    peer: float | None = None
    peer_name: str | None = None

    def document(self) -> dict[str, object]:
        ratio = round(self.ours / self.peer, 3) if self.ours is not None and self.peer else None
        return {**asdict(self), "ratio": ratio}


@dataclass(frozen=True)
class Bar:
    """A promise and whether this run kept it. `op` is ">=" or "<="."""

    name: str
    value: float | None
    op: str
    bound: float
    reason: str | None = None

    def document(self) -> dict[str, object]:
        holds = self.value is not None and (self.value >= self.bound if self.op == ">=" else self.value <= self.bound)
        return {**asdict(self), "holds": holds}


@dataclass
class Report:
    """Rows and bars of one benchmark run. more: further entries of the document."""

    name: str
    seed: int = 0
    rows: list[Row] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    more: dict[str, object] = field(default_factory=dict)

    def write(self, path: Path | None = None) -> Path:
        """Writes the JSON, results/NAME.json unless a path is given, and NAME.md beside it; returns the JSON's path.

        A reader finds the last whole document, whenever this is stopped.
        """
        document = {
            "name": self.name,
            "commit": _commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "machine": machine(),
            "seed": self.seed,
            "rows": [row.document() for row in self.rows],
            "bars": [bar.document() for bar in self.bars],
            **self.more,
        }
        path = path or RESULTS / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, text in (
            (path, json.dumps(document, indent=1) + "\n"),
            (path.with_suffix(".md"), self.markdown(document)),
        ):
            new = target.with_suffix(f"{target.suffix}.new")
            new.write_text(text)
            new.replace(target)
        return path

    def markdown(self, document: dict[str, object]) -> str:
        facts = document["machine"]
        lines = [f"# {self.name}\n", f"Commit {document['commit']}, {document['date']}, {facts}\n"]
        lines += ["| case | metric | unit | ours | peer | ratio |", "| --- | --- | --- | --- | --- | --- |"]
        for row in (row.document() for row in self.rows):
            peer = f"{_number(row['peer'])} ({row['peer_name']})" if row["peer"] is not None else ""
            lines.append(
                f"| {row['case']} | {row['metric']} | {row['unit']} | {_number(row['ours'])} | {peer} "
                f"| {_number(row['ratio'])} |"
            )
        lines += ["", "| bar | value | bound | holds |", "| --- | --- | --- | --- |"]
        for bar in (bar.document() for bar in self.bars):
            value = _number(bar["value"]) or f"not measured: {bar['reason']}"
            lines.append(
                f"| {bar['name']} | {value} | {bar['op']} {bar['bound']} | {'yes' if bar['holds'] else 'no'} |"
            )
        return "\n".join(lines) + "\n"


def machine() -> dict[str, object]:
    """Facts that a reader needs to place the numbers."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    flags = next((line.split(":", 1)[1].split() for line in info.splitlines() if line.startswith("flags")), [])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "flags": [flag for flag in flags if flag.startswith(("avx", "amx"))],
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) and not isinstance(value, bool) else ""
