"""`paceline explain request`: the reason and the missing quantity of one waiting request, or of all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline_cli.commands import explain_request
from paceline_cli.commands.explain_request import UNITS, Options
from paceline_cli.errors import CliError
from paceline_engine.core.waiting import REASONS


def waiting(request_id: str, position: int) -> dict[str, Any]:
    message = "3 KV blocks more must become free"
    return {
        "request_id": request_id, "position": position, "priority": 2, "reason": "blocks", "missing": 3.0,
        "message": message if position == 0 else f"{position} requests are ahead; for the first, {message}",
        "num_tokens": 600, "num_preemptions": 1, "waited_s": 4.26,
    }  # fmt: skip


STORED = "of 600 tokens 512 in disk; 512 are loaded: the first token comes in 0.1 s, else in 2 s"
HANDED_OFF = {
    "request_id": "gone/3d",
    "side": "decode",
    "outcome": "expired",
    "message": "computed: expired",
    "at": 1.0,
}
ANSWER = {
    "num_running": 1,
    "stored": {"mine/1b": STORED, "busy/0a": STORED},
    "running": ["busy/0a"],
    "waiting": [waiting("mine/1b", 0), waiting("a/b/2c", 1)],
    "handoffs": [HANDED_OFF],
}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []

    def get(url: str, path: str, **_: Any) -> Any:
        asked.append((url, path))
        return ANSWER

    monkeypatch.setattr(explain_request, "get", get)
    return asked


def run(capsys: pytest.CaptureFixture[str], request_id: str, as_json: bool = False) -> str:
    assert explain_request.run(request_id, Options("http://e", None, as_json)) == 0
    return capsys.readouterr().out


def test_a_waiting_request_has_its_reason_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], engine: list[tuple[str, str]]
) -> None:
    assert run(capsys, "mine").splitlines() == [
        "mine/1b: waiting for 4.3 s, place 1 of 2",
        "  why: 3 KV blocks more must become free",
        "  missing: 3 KV blocks (blocks)",
        "  600 tokens, priority 2, preempted 1 times",
        f"  stored KV: {STORED}",
    ]
    assert engine == [("http://e", "/admin/explain")]
    assert "1 requests are ahead" in run(capsys, "a/b")


def test_every_reason_of_the_engine_has_a_unit() -> None:
    assert set(UNITS) == set(REASONS)


def test_one_that_runs_and_one_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "busy") == f"busy/0a: running\n  stored KV: {STORED}\n"
    for absent in ("min", "mine/", "a", "1b"):
        with pytest.raises(CliError, match="it has ended, or never came"):
            run(capsys, absent)


def test_without_an_id_all_are_told_and_json_is_the_engines_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "")
    assert all(name in text for name in ("busy/0a: running", "mine/1b: waiting", "a/b/2c: waiting"))
    mine = {"running": [], "waiting": [ANSWER["waiting"][0]], "stored": {"mine/1b": STORED}, "handoffs": []}
    assert json.loads(run(capsys, "mine", as_json=True)) == mine


def test_one_that_has_ended_is_still_known_by_its_hand_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "gone") == "gone/3d: hand-off (decode): computed: expired\n"
    assert json.loads(run(capsys, "gone", as_json=True))["handoffs"] == [HANDED_OFF]
