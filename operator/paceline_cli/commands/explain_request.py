"""`paceline explain request [ID]`: what a waiting request waits for, how much of it is missing, and its hand-offs.

The engine's admin port knows: it answers for the scheduler's last step, and for the latest hand-offs.
Standard library only.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_cli.engine_call import get
from paceline_cli.errors import EXIT_DONE, CliError

TIMEOUT_SECONDS = 30.0
# What is missing, by the engine's reason.
UNITS = {
    "blocks": "KV blocks",
    "seqs": "places among the running requests",
    "budget": "tokens of the step",
    "batch": "seconds",
    "prefix": "tokens of another request's prompt",
    "kv": "tokens of stored KV",
    "preemption": "KV blocks",
}


@dataclass(frozen=True, slots=True)
class Options:
    """engine: base URL of the admin port. token_file: with the engine's bearer token."""

    engine: str
    token_file: Path | None
    as_json: bool


def run(request_id: str, options: Options) -> int:
    """The exit code; the report goes to stdout. Without an id it is about all waiting requests."""
    answer = get(options.engine, "/admin/explain", token_file=options.token_file, timeout=TIMEOUT_SECONDS)
    waiting = [entry for entry in answer["waiting"] if _is(entry["request_id"], request_id)]
    running = [name for name in answer["running"] if _is(name, request_id)]
    handoffs = [entry for entry in answer["handoffs"] if _is(entry["request_id"], request_id)] if request_id else []
    if request_id and not waiting and not running and not handoffs:
        raise CliError(f"the engine at {options.engine} has no request {request_id!r}: it has ended, or never came")
    if options.as_json:
        stored = {name: text for name, text in answer.get("stored", {}).items() if _is(name, request_id)}
        about = {"running": running, "waiting": waiting, "stored": stored, "handoffs": handoffs}
        sys.stdout.write(json.dumps(about) + "\n")
        return EXIT_DONE
    stored = {name: f"  stored KV: {text}" for name, text in answer.get("stored", {}).items()}
    lines = _lines(running, waiting, len(answer["waiting"]), stored)
    lines += [f"{entry['request_id']}: hand-off ({entry['side']}): {entry['message']}" for entry in handoffs]
    sys.stdout.write("".join(f"{line}\n" for line in lines or ["no request runs or waits"]))
    return EXIT_DONE


def _is(core_id: str, request_id: str) -> bool:
    """The engine appends an id of its own to the client's, which may not be unique."""
    return not request_id or core_id == request_id or core_id.rpartition("/")[0] == request_id


def _lines(running: list[str], waiting: list[dict[str, Any]], num_waiting: int, stored: dict[str, str]) -> list[str]:
    lines = [line for name in running for line in (f"{name}: running", stored.get(name)) if line]
    for entry in waiting:
        missing, unit = entry["missing"], UNITS.get(entry["reason"], "")
        place = f"place {entry['position'] + 1} of {num_waiting}"
        lines += [
            f"{entry['request_id']}: waiting for {entry['waited_s']:.1f} s, {place}",
            f"  why: {entry['message']}",
            f"  missing: {missing:g} {unit} ({entry['reason']})",
            f"  {entry['num_tokens']} tokens, priority {entry['priority']}, preempted {entry['num_preemptions']} times",
            *((line,) if (line := stored.get(entry["request_id"])) else ()),
        ]
    return lines
