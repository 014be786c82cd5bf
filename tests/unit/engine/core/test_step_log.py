"""The step log: bounded, complete in itself, and replayed without a model to the same decisions."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from driver import add, finish_all, make, step
from fuzz_client import Client, make_client
from typer.testing import CliRunner

from paceline_engine.cli import app
from paceline_engine.core.outputs import StepPlan
from paceline_engine.core.request import Request
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.state import request_to_state
from paceline_engine.core.step_log import Planned, Segment, StepLog, decoded, replay
from paceline_engine.messages import SamplingParams


def logged_run(seed: int, weight: int) -> Client:
    client = make_client(seed, weight)
    assert client.log is not None
    client.log.begin()
    for _ in range(30):
        for _ in range(client.rng.choice((0, 0, 1, 3))):
            client.add()
        if client.rng.random() < 0.15:
            client.disturb()
        client.step()
    return client


@pytest.mark.parametrize("batch", range(4))
def test_a_replay_makes_every_decision_again(batch):
    num_steps = num_later = 0
    for seed in range(batch, 300, 4):
        log = logged_run(seed, weight=700).log
        assert log is not None
        segments = decoded(log.encoded())
        assert 1 <= len(segments) <= 2
        for segment in segments:
            assert replay(segment) is None, f"seed {seed}"
            steps = [entry for entry in segment.entries if isinstance(entry, Planned) and entry.plan.scheduled]
            num_steps += len(steps)
            num_later += len(steps) if segment.state.requests else 0
    assert num_steps > 500
    assert num_later > 200, "few segments began in the middle of requests"


def test_a_replay_notices_another_decision():
    scheduler = make()
    log = StepLog(scheduler)
    log.begin()
    for name in "ab":
        add(scheduler, name, 4, 3)
    before = StepLog(scheduler)
    before.begin()
    plan = scheduler.schedule()
    before.planned(0.0, plan)
    segment = before.segments[0]
    assert replay(segment) is None
    (entry,) = segment.entries
    assert isinstance(entry, Planned)
    other = msgspec.structs.replace(entry.plan, scheduled=entry.plan.scheduled[:1])
    segment.entries[0] = msgspec.structs.replace(entry, plan=other)
    difference = replay(segment)
    assert difference is not None
    assert (difference.step, len(difference.replayed.scheduled)) == (0, 2)


def test_the_log_is_bounded():
    scheduler = make()
    log = StepLog(scheduler, max_weight=200)
    for number in range(300):
        log.begin()
        add(scheduler, str(number), 4, 1)
        plan, _ = step(scheduler)
        log.planned(0.0, plan)
        log.updated((), 0.0)
    assert len(log.segments) == 2
    assert sum(len(segment.entries) for segment in log.segments) < 30


def test_a_restored_scheduler_finishes_what_the_first_one_began():
    scheduler = make(cache="radix", num_blocks=20, seqs=3)
    for number in range(6):
        add(scheduler, str(number), 9 + number, 20, priority=number % 2)
    for _ in range(9):
        step(scheduler)
    twin = Scheduler.from_state(scheduler.state())
    twin.check_integrity()
    assert finish_all(twin) == finish_all(scheduler)
    assert twin.kv.pool.free_order() == scheduler.kv.pool.free_order()


def test_every_field_of_a_request_is_kept_but_the_derived_one():
    fields = {field.name for field in dataclasses.fields(Request)}
    sampling = SamplingParams(max_tokens=1)
    request = Request(request_id="a", token_ids=[1], num_prompt_tokens=1, sampling=sampling, max_total_tokens=2)
    assert fields - set(request_to_state(request)) == {"ngrams"}


def test_something_else_is_no_log():
    with pytest.raises(ValueError, match="not a step log"):
        decoded(b"\x81\xa1a\x01")


def test_the_command_line_replays_a_log(tmp_path):
    path, broken = tmp_path / "log", tmp_path / "broken"
    log = logged_run(2, weight=10_000).log
    assert log is not None
    path.write_bytes(log.encoded())
    segment = log.segments[-1]
    at = next(i for i, entry in enumerate(segment.entries) if isinstance(entry, Planned) and entry.plan.scheduled)
    segment.entries[at] = msgspec.structs.replace(segment.entries[at], plan=StepPlan())
    broken.write_bytes(log.encoded())
    good, bad, none = (CliRunner().invoke(app, ["replay", str(name)]) for name in (path, broken, tmp_path / "none"))
    assert (good.exit_code, bad.exit_code, none.exit_code) == (0, 1, 2)
    assert "every decision the same" in good.output
    assert f"step {at_step(segment, at)}: recorded" in bad.output
    assert "can't read the step log" in none.output


def at_step(segment: Segment, at: int) -> int:
    return sum(isinstance(entry, Planned) for entry in segment.entries[:at])
