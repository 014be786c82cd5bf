"""Shows views to a person (a live table), to a log (a line for each change) or to a program (JSON lines).

All three write to stdout. Must not decide anything: what a view means is `view`'s business.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from paceline_cli.commands.up.view import ObjectRow, PodRow, Trouble, View, age_text

HEARTBEAT_S = 10.0
"""A line-by-line screen says at least this often what it waits for."""
_TROUBLES_SHOWN = 3
_TROUBLE = "trouble of "


class Screen(Protocol):
    """`elapsed_s` counts from the start of the command."""

    def show(self, view: View, elapsed_s: float) -> None:
        """The state changed, or time passed."""
        ...

    def say(self, event: str, text: str, **facts: Any) -> None:
        """Something that stays: `event` names it for programs, `text` is for people."""
        ...

    def close(self) -> None: ...


class _Changes:
    """Remembers what was shown last of each object and pod."""

    def __init__(self) -> None:
        self._shown: dict[str, object] = {}

    def changed(self, key: str, value: object) -> bool:
        """Whether `value` is not what was shown last."""
        before = self._shown.get(key)
        self._shown[key] = value
        return before != value

    def gone(self, view: View) -> list[str]:
        """What was shown and is not there any more; it is forgotten."""
        present = {row.label for row in view.objects} | {f"pod {row.name}" for row in view.pods}
        keys = [key for key in self._shown if key.removeprefix(_TROUBLE) not in present]
        for key in keys:
            del self._shown[key]
        return [key for key in keys if not key.startswith(_TROUBLE)]


class LineScreen:
    """One line for each change; while something is not ready, a line now and then of what is waited for."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._changes = _Changes()
        self._last_s = 0.0

    def show(self, view: View, elapsed_s: float) -> None:
        changed = self._changes.changed
        lines = [_object_line(row) for row in view.objects if changed(row.label, (row.ready, row.reason))]
        lines += [_pod_line(row) for row in view.pods if changed(f"pod {row.name}", (row.state, row.restarts))]
        for trouble in view.troubles:
            if changed(f"{_TROUBLE}pod {trouble.pod}", (trouble.times, trouble.reason)):
                lines += trouble_lines(trouble)
        lines += [f"{name} is gone" for name in self._changes.gone(view)]
        if not lines and not view.ready and elapsed_s - self._last_s >= HEARTBEAT_S:
            lines = [f"waiting: {text}" for text in waiting_for(view)]
        for line in lines:
            self._write(f"{elapsed_s:6.1f}s  {line}\n")
            self._last_s = elapsed_s

    def say(self, event: str, text: str, **facts: Any) -> None:
        del event, facts
        self._write(text + "\n")

    def close(self) -> None:
        """Nothing to undo."""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class JsonScreen:
    """One JSON object a line: `{"event": "object" | "pod" | ..., "elapsed_s": ..., ...}`, on each change."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._changes = _Changes()
        self._elapsed_s = 0.0

    def show(self, view: View, elapsed_s: float) -> None:
        self._elapsed_s = elapsed_s
        for row in view.objects:
            self._emit_change("object", row.label, asdict(row))
        for pod in view.pods:
            facts = asdict(pod)
            del facts["age_s"]  # would make every moment a change
            self._emit_change("pod", f"pod {pod.name}", facts)
        for name in self._changes.gone(view):
            self._emit("gone", {"what": name})

    def say(self, event: str, text: str, **facts: Any) -> None:
        self._emit(event, {"text": text, **facts})

    def close(self) -> None:
        """Nothing to undo."""

    def _emit_change(self, event: str, key: str, facts: dict[str, Any]) -> None:
        if self._changes.changed(key, facts):
            self._emit(event, facts)

    def _emit(self, event: str, facts: dict[str, Any]) -> None:
        self._stream.write(json.dumps({"event": event, "elapsed_s": round(self._elapsed_s, 3), **facts}) + "\n")
        self._stream.flush()


class TableScreen:
    """A table at the bottom of the terminal that is redrawn in place; what was said stays above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, force_terminal=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, view: View, elapsed_s: float) -> None:
        self._live.update(_tables(view, elapsed_s), refresh=True)

    def say(self, event: str, text: str, **facts: Any) -> None:
        del facts
        if event == "stopping":
            # What the table said is not true any more.
            self._live.update("", refresh=True)
        # Long lines are left to the terminal, so that a command can be copied as it is.
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def make_screen(*, json_lines: bool, tty: bool) -> Screen:
    """A table only where a person looks."""
    if json_lines:
        return JsonScreen()
    return TableScreen() if tty else LineScreen()


def waiting_for(view: View) -> list[str]:
    """What keeps the view from being ready."""
    objects = [f"{row.label}: {row.reason or 'new'} {row.message}".strip() for row in view.objects if _waits(row)]
    pods = [f"pod {row.name}: {row.note}" for row in view.pods if row.note]
    return objects + pods


def _waits(row: ObjectRow) -> bool:
    return row.ready != "True" and row.kind == "InferenceService"


def trouble_lines(trouble: Trouble) -> list[str]:
    """Why a pod does not run, the end of its log, and where the rest is."""
    return [
        f"pod {trouble.pod}: {trouble.reason}",
        *(f"    {line}" for line in trouble.lines),
        f"    log: {trouble.log}",
    ]


def _object_line(row: ObjectRow) -> str:
    text = f"{row.label} Ready={row.ready} {row.reason}".rstrip()
    return f"{text}: {row.message}" if row.message else text


def _pod_line(row: PodRow) -> str:
    port = f" on port {row.port}" if row.port else ""
    restarts = f", restarts {row.restarts}" if row.restarts else ""
    return f"pod {row.name} {row.state}{port}{restarts}"


def _tables(view: View, elapsed_s: float) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    objects = Table("OBJECT", "READY", "REASON", "MESSAGE", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in view.objects:
        objects.add_row(row.label, Text(row.ready, _colour(row.ready, row.stalled)), row.reason, Text(_said(row)))
    pods = Table("POD", "STATE", "RESTARTS", "PORT", "AGE", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for pod in view.pods:
        state = Text(pod.state, "green" if pod.ready else "red" if pod.trouble else "yellow")
        port = str(pod.port or "-")
        pods.add_row(
            pod.name,
            state,
            str(pod.restarts),
            port,
            age_text(pod.age_s),
            Text(pod.note, overflow="ellipsis", no_wrap=True),
        )
    parts: list[Any] = ["", objects, "", pods]
    troubles = view.troubles[:_TROUBLES_SHOWN]
    parts += [Text("\n".join(trouble_lines(trouble)), "red") for trouble in troubles]
    head = "Ctrl-C stops everything" if view.ready else f"starting, {elapsed_s:.0f} s"
    return Group(*parts, "", Text(head, "dim"))


def _said(row: ObjectRow) -> str:
    """A gateway that serves is known by its URL."""
    return row.url if row.kind == "Router" and row.ready == "True" and row.url else row.message


def _colour(ready: str, stalled: bool) -> str:
    if ready == "True":
        return "green"
    return "red" if stalled else "yellow"
