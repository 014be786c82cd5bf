"""What the GPU benchmark does with its time, with failures and when it is stopped; and the page made of its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from on_gpu.run import MAX_FAILED, Run
from on_gpu.targets import NO_DEVICE, TARGETS, bars, page
from report import Row


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path, clock: Clock) -> Run:
    return Run(tmp_path / "gpu.json", budget_s=100.0, is_dry=False, clock=clock)


def written(run: Run) -> dict[str, Any]:
    return json.loads(run.write().read_text())


def case(run: Run, clock: Clock, names: str, seconds: float) -> None:
    for name, _ in run.cases((name, None) for name in names):
        with run.case(name):
            clock.now += seconds
            run.add(Row(name, "time", "s", seconds))


def test_cases_beyond_a_sections_time_are_listed_and_the_next_section_has_its_own(run, clock):
    run.section("first", lambda: case(run, clock, "abcd", 10.0), least_s=5.0, most_s=20.0)
    run.section("second", lambda: case(run, clock, "ef", 10.0), least_s=5.0, most_s=60.0)
    first, second = written(run)["sections"]
    assert (first["num_done"], first["not_run"], first["reason"]) == (2, ["c", "d"], "out of time")
    assert (second["num_done"], second["not_run"]) == (2, [])
    assert [row["case"] for row in written(run)["rows"]] == ["a", "b", "e", "f"]


def test_a_section_that_does_not_fit_is_not_begun_and_says_why(run, clock):
    run.section("first", lambda: case(run, clock, "a", 90.0), least_s=5.0, most_s=99.0)
    run.section("second", lambda: case(run, clock, "b", 1.0), least_s=30.0, most_s=60.0)
    second = written(run)["sections"][1]
    assert (second["status"], second["reason"]) == ("not run", "10 s are left and it needs 30")
    assert not run.has_failed


def test_a_case_that_fails_is_named_and_ends_nothing_else(run, clock):
    def work() -> None:
        for name, _ in run.cases((name, None) for name in "abc"):
            with run.case(name):
                if name == "b":
                    raise ValueError("wrong\nnumbers")
                run.add(Row(name, "time", "s", 1.0))

    run.section("first", work, least_s=1.0, most_s=10.0)
    (section,) = written(run)["sections"]
    assert (section["status"], section["num_done"], section["num_failed"]) == ("done", 2, 1)
    assert section["failed"] == ["b: ValueError: wrong numbers"]
    assert run.has_failed


def test_of_many_failures_the_first_are_kept(run):
    def work() -> None:
        for number in range(3 * MAX_FAILED):
            run.fail(str(number), ValueError("wrong"))

    run.section("first", work, least_s=1.0, most_s=10.0)
    (section,) = written(run)["sections"]
    assert (section["num_failed"], len(section["failed"])) == (3 * MAX_FAILED, MAX_FAILED)


def test_nothing_more_is_tried_on_a_lost_device(run, clock):
    alive = [True]
    run.is_alive = lambda: alive[0]

    def work() -> None:
        for name, _ in run.cases((name, None) for name in "abc"):
            with run.case(name):
                alive[0] = False
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run.section("first", work, least_s=1.0, most_s=10.0)
    run.section("second", lambda: case(run, clock, "d", 1.0), least_s=1.0, most_s=10.0)
    first, second = written(run)["sections"]
    assert (first["num_failed"], first["not_run"], first["reason"]) == (1, ["b", "c"], "the device is lost")
    assert (second["status"], second["reason"]) == ("not run", "the device is lost")


def test_what_was_done_before_an_interrupt_is_on_disk(run, clock, tmp_path):
    def work() -> None:
        case(run, clock, "a", 1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.section("first", work, least_s=1.0, most_s=10.0)
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["case"] for row in document["rows"]] == ["a"]
    assert document["sections"][0]["status"] == "interrupted"
    assert run.has_failed


def test_a_section_whose_packages_are_missing_is_not_a_failure(run):
    run.section("first", lambda: __import__("no_such_package"), least_s=1.0, most_s=10.0)
    (section,) = written(run)["sections"]
    assert (section["status"], section["reason"]) == ("not run", "needs no_such_package, which isn't here")
    assert not run.has_failed
    run.section("second", lambda: __import__("paceline_engine.gone"), least_s=1.0, most_s=10.0)
    assert run.has_failed


def test_a_dry_run_reaches_no_target(tmp_path, clock):
    run = Run(tmp_path / "gpu.json", budget_s=100.0, is_dry=True, clock=clock)
    run.measured = {target.key: 2 * target.bound for target in TARGETS}
    assert [bar["value"] for bar in written(run)["bars"]] == [None] * len(TARGETS)


def test_the_page_says_what_is_not_measured():
    document = {"dry_run": True, "bars": [bar.document() for bar in bars({"decode attention": 0.9}, "")]}
    assert page(document) == page(None)
    assert page(None).count(NO_DEVICE) == len(TARGETS)


def test_the_page_shows_what_a_run_measured():
    measured = {"decode attention": 0.9, "prefill attention": 0.4}
    device = {"name": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "driver": "580"}
    document = {"dry_run": False, "bars": [bar.document() for bar in bars(measured, "no time")], "device": device}
    lines = page(document | {"commit": "abc", "date": "2026-12-01"}).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[2:] for line in lines if line.startswith("|")}
    assert rows[TARGETS[0].name] == ["0.9", "yes |"]
    assert rows[TARGETS[1].name] == ["0.4", "no |"]
    assert rows[TARGETS[2].name][0] == NO_DEVICE
    assert "NVIDIA H200" in "\n".join(lines)
