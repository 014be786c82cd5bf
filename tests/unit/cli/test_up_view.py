"""What `paceline up` shows: rows from manifests, and the three ways to show them."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from paceline_cli.commands.up.screen import JsonScreen, LineScreen, TableScreen, make_screen
from paceline_cli.commands.up.view import Log, View, age_text, curl_command, last_line, view_of

NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def service(ready: str, reason: str, *, generation: int = 1, observed: int = 1, **conditions: str) -> dict[str, Any]:
    listed = [{"type": "Ready", "status": ready, "reason": reason, "message": "why"}]
    listed += [{"type": kind, "status": status} for kind, status in conditions.items()]
    return {
        "kind": "InferenceService",
        "metadata": {"name": "chat", "generation": generation},
        "status": {"observedGeneration": observed, "conditions": listed},
    }


def pod(*, state: dict[str, Any], ready: bool = False, restarts: int = 0, **more: Any) -> dict[str, Any]:
    container = {"name": "engine", "ready": ready, "restartCount": restarts, "state": state, **more}
    return {
        "kind": "Pod",
        "metadata": {"name": "chat-1", "creationTimestamp": "2026-01-01T00:00:18Z"},
        "status": {"phase": "Running", "containerStatuses": [container]},
    }


def seen(objects: list[dict[str, Any]], pods: list[dict[str, Any]], tail: str = "") -> View:
    return view_of(objects, pods, now=NOW, port_of=lambda pod: 20001, log_of=lambda pod: Log("/logs/engine.log", tail))


@pytest.mark.parametrize(
    ("manifest", "ready"),
    [
        (service("True", "Serving"), True),
        (service("True", "Serving", generation=2), False),
        (service("False", "EnginesStarting"), False),
        (service("False", "ScaledToZero"), True),
        ({"kind": "InferenceService", "metadata": {"name": "chat", "generation": 1}}, False),
        ({"kind": "Tenant", "metadata": {"name": "x"}}, False),
    ],
)
def test_ready_means_that_every_service_serves_what_was_asked_last(manifest: dict[str, Any], ready: bool) -> None:
    assert seen([manifest], []).ready is ready


def test_a_url_that_leads_nowhere_yet_is_not_ready() -> None:
    view = view_of(
        [service("True", "Serving")], [], now=NOW, port_of=len, log_of=lambda pod: Log("", ""), reachable=False
    )
    assert not view.ready


def test_a_pod_that_loads_shows_what_its_process_said_last() -> None:
    (row,) = seen([], [pod(state={"running": {}})], 'x\n{"level": "info", "message": "converting weights"}\n\n').pods
    assert (row.state, row.note, row.port, row.age_s) == ("Starting", "converting weights", 20001, 42)
    assert row.trouble is None


def test_a_ready_pod_is_quiet() -> None:
    (row,) = seen([], [pod(state={"running": {}}, ready=True, restarts=1)], "noise").pods
    assert (row.state, row.note, row.restarts, row.trouble) == ("Ready", "", 1, None)


def test_a_crash_shows_the_end_of_the_log_and_where_it_is() -> None:
    ended = {"exitCode": 2, "reason": "Error"}
    crashed = pod(state={"waiting": {"reason": "CrashLoopBackOff"}}, restarts=3, lastState={"terminated": ended})
    (trouble,) = seen([], [crashed], "".join(f"line {n}\n" for n in range(20))).troubles
    assert trouble.reason == "CrashLoopBackOff: Error, exit code 2"
    assert trouble.lines[-1] == "line 19"
    assert len(trouble.lines) <= 6
    assert trouble.log == "/logs/engine.log"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (
            {"waiting": {"reason": "CreateContainerConfigError", "message": "spec.tty: no"}},
            "CreateContainerConfigError: spec.tty: no",
        ),
        ({"waiting": {"reason": "ContainerCreating", "message": "port 80 is taken"}}, "port 80 is taken"),
    ],
)
def test_a_pod_that_cannot_start_says_why(state: dict[str, Any], reason: str) -> None:
    assert [trouble.reason for trouble in seen([], [pod(state=state)]).troubles] == [reason]


def test_a_container_that_is_being_created_is_no_trouble() -> None:
    assert seen([], [pod(state={"waiting": {"reason": "ContainerCreating"}})]).troubles == []


def test_lines_are_written_once_for_each_change_and_a_heartbeat_tells_what_is_waited_for() -> None:
    stream = io.StringIO()
    screen = LineScreen(stream)
    starting = seen([service("False", "EnginesStarting")], [pod(state={"running": {}})], "loading\n")
    screen.show(starting, 0.1)
    screen.show(starting, 5.0)
    screen.show(starting, 10.5)
    screen.show(seen([service("True", "Serving")], [pod(state={"running": {}}, ready=True)]), 11.0)
    assert stream.getvalue().splitlines() == [
        "   0.1s  InferenceService/chat Ready=False EnginesStarting: why",
        "   0.1s  pod chat-1 Starting on port 20001",
        "  10.5s  waiting: InferenceService/chat: EnginesStarting why",
        "  10.5s  waiting: pod chat-1: loading",
        "  11.0s  InferenceService/chat Ready=True Serving: why",
        "  11.0s  pod chat-1 Ready on port 20001",
    ]


def test_each_crash_is_told_once() -> None:
    stream = io.StringIO()
    screen = LineScreen(stream)
    for restarts in (1, 1, 2):
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        last = {"terminated": {"exitCode": 1, "reason": "Error"}}
        screen.show(seen([], [pod(state=waiting, restarts=restarts, lastState=last)], "boom\n"), 1.0)
    assert stream.getvalue().count("boom") == 2


def test_what_goes_is_told_once_and_may_come_back() -> None:
    lines, objects = io.StringIO(), io.StringIO()
    running = [pod(state={"running": {}})]
    for screen in (LineScreen(lines), JsonScreen(objects)):
        for pods in (running, [], [], running):
            screen.show(seen([], pods), 1.0)
    assert lines.getvalue().count("pod chat-1 is gone") == 1
    assert lines.getvalue().count("pod chat-1 Starting") == 2
    events = [json.loads(line)["event"] for line in objects.getvalue().splitlines()]
    assert events == ["pod", "gone", "pod"]


def test_json_lines_are_complete_and_only_for_changes() -> None:
    stream = io.StringIO()
    screen = JsonScreen(stream)
    view = seen([service("True", "Serving")], [pod(state={"running": {}}, ready=True)])
    screen.show(view, 1.0)
    screen.show(view, 2.0)
    screen.say("ready", "it is", url="http://x")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["object", "pod", "ready"]
    assert lines[0]["ready"] == "True"
    assert (lines[1]["port"], lines[2]["url"]) == (20001, "http://x")


def test_the_table_shows_objects_pods_and_crashes(capsys) -> None:
    screen = make_screen(json_lines=False, tty=True)
    assert isinstance(screen, TableScreen)
    last = {"terminated": {"exitCode": 1, "reason": "Error"}}
    crashed = pod(state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=last)
    screen.show(seen([service("False", "EnginesFailing", Stalled="True")], [crashed], "boom [/red]\n"), 3.0)
    screen.say("note", "curl 'a' [b]")
    screen.close()
    out = capsys.readouterr().out
    for text in ("InferenceService/chat", "EnginesFailing", "CrashLoopBackOff", "20001", "boom [/red]", "curl 'a' [b]"):
        assert text in out


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (90000, "1d")])
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_the_last_line_is_shown_without_its_time_and_level() -> None:
    line = "2026-11-30 03:42:50,132 INFO paceline_engine.server.process: metrics listens on 1.2.3.4"
    assert last_line(f"{line}\n\n") == "metrics listens on 1.2.3.4"
    assert (last_line(""), last_line("\n \n"), last_line("{not json")) == ("", "", "{not json")


def test_the_curl_command_can_be_pasted() -> None:
    import shlex

    words = shlex.split(curl_command("http://127.0.0.1:8080/v1", "chat", needs_key=False))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8080/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("chat", True)
    assert "$API_KEY" in curl_command("http://x/v1", "chat", needs_key=True)
