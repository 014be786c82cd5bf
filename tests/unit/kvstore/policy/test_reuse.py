"""The choice between loading and computing, by its properties, and on a trace against always and never loading."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore.policy.estimate import Prior, TransferTime
from paceline_kvstore.policy.reuse import (
    Candidate,
    Decision,
    Prefill,
    Regret,
    ReuseMode,
    Source,
    decide,
    loaded_after,
)

MIB = 1 << 20
LEVELS = ("memory", "disk", "s3")

sources_of = st.fixed_dictionaries(
    {
        level: st.builds(
            Source,
            latency_s=st.floats(0, 1),
            bandwidth=st.floats(1e5, 1e11),
            readers=st.integers(1, 8),
            queued=st.integers(0, 30),
        )
        for level in LEVELS
    }
)
chunks_of = st.lists(
    st.builds(
        Candidate,
        level=st.sampled_from(LEVELS),
        num_tokens=st.integers(1, 512),
        num_bytes=st.integers(1, 64 * MIB),
    ),
    min_size=1,
    max_size=12,
)
prefills = st.builds(
    Prefill, tokens_per_s=st.floats(10, 1e5), queue_s=st.floats(0, 5), placement_bandwidth=st.floats(1e8, 1e11)
)


def _tokens(chunks: list[Candidate], extra: int = 0) -> int:
    return sum(chunk.num_tokens for chunk in chunks) + extra


def _faster(source: Source, factor: float) -> Source:
    return replace(source, bandwidth=source.bandwidth * factor)


@given(chunks_of, sources_of, prefills, st.floats(1, 100), st.sampled_from(LEVELS))
def test_more_bandwidth_never_makes_the_first_token_later(
    chunks: list[Candidate], sources: dict[str, Source], prefill: Prefill, factor: float, level: str
) -> None:
    before = decide(chunks, sources, prefill, _tokens(chunks, 10))
    after = decide(chunks, sources | {level: _faster(sources[level], factor)}, prefill, _tokens(chunks, 10))
    assert after.first_token_s <= before.first_token_s + 1e-9


@given(chunks_of, sources_of, prefills, st.floats(1.01, 100))
def test_more_bandwidth_never_loads_less(
    chunks: list[Candidate], sources: dict[str, Source], prefill: Prefill, factor: float
) -> None:
    chunks = [replace(chunk, level="disk", num_bytes=MIB) for chunk in chunks]
    fast = sources | {"disk": _faster(sources["disk"], factor)}
    total = _tokens(chunks, 10)
    first, second = decide(chunks, sources, prefill, total), decide(chunks, fast, prefill, total)
    # Rounding may break a tie either way.
    gain = second.first_token_s - _cost(chunks[: first.num_chunks], fast, prefill, total)
    assert second.num_chunks >= first.num_chunks or abs(gain) < 1e-9


def _cost(chunks: list[Candidate], sources: dict[str, Source], prefill: Prefill, total: int) -> float:
    loaded = list(loaded_after(chunks, sources, prefill.placement_bandwidth, 0.0))
    return prefill.first_token_s(loaded[-1] if loaded else 0.0, total - _tokens(chunks))


@given(chunks_of, sources_of, prefills)
def test_nothing_is_loaded_that_is_predicted_slower(
    chunks: list[Candidate], sources: dict[str, Source], prefill: Prefill
) -> None:
    total = _tokens(chunks, 10)
    decision = decide(chunks, sources, prefill, total)
    costs = [_cost(chunks[:count], sources, prefill, total) for count in range(len(chunks) + 1)]
    assert decision.first_token_s == pytest.approx(min(costs))
    assert costs[decision.num_chunks] == pytest.approx(min(costs))


@given(chunks_of, sources_of, prefills, st.integers(0, 11), st.sampled_from([ReuseMode.MEASURED, ReuseMode.ALWAYS]))
def test_the_tail_is_cut_exactly_at_the_deadline(
    chunks: list[Candidate], sources: dict[str, Source], prefill: Prefill, at: int, mode: ReuseMode
) -> None:
    loads = list(loaded_after(chunks, sources, prefill.placement_bandwidth, 0.0))
    deadline = loads[at % len(loads)]
    eligible = sum(load <= deadline for load in loads)
    total = _tokens(chunks)
    if mode is ReuseMode.ALWAYS:
        assert decide(chunks, sources, prefill, total, deadline_s=deadline, mode=mode).num_chunks == eligible
        before = decide(chunks, sources, prefill, total, deadline_s=math.nextafter(deadline, 0.0), mode=mode)
        assert before.num_chunks == sum(load < deadline for load in loads)
    else:
        cut = decide(chunks, sources, prefill, total, deadline_s=deadline)
        assert cut == decide(chunks[:eligible], sources, prefill, total)


def test_a_busy_engine_loads_from_where_an_idle_one_computes() -> None:
    chunks = [Candidate("s3", 256, 8 * MIB)] * 4
    sources = {"s3": Source(latency_s=0.05, bandwidth=20e6, readers=4)}
    assert decide(chunks, sources, Prefill(10_000.0), 1024).num_chunks == 0
    assert decide(chunks, sources, Prefill(10_000.0, queue_s=2.0), 1024).num_chunks == 4


def test_a_fast_head_is_loaded_without_its_slow_tail() -> None:
    chunks = [*[Candidate("memory", 256, MIB)] * 3, *[Candidate("s3", 256, MIB)] * 3]
    sources = {"memory": Source(0.0, 1e10, 8), "s3": Source(5.0, 1e6, 4)}
    assert decide(chunks, sources, Prefill(1000.0), 1536).num_chunks == 3
    assert decide(chunks, sources, Prefill(1000.0), 1536, mode=ReuseMode.ALWAYS).num_chunks == 6
    assert decide(chunks, sources, Prefill(1000.0), 1536, mode=ReuseMode.NEVER).num_chunks == 0


def test_a_queue_at_a_level_counts() -> None:
    chunks = [Candidate("disk", 256, MIB)]
    idle, busy = (Source(0.1, 1e9, readers=2, queued=queued) for queued in (0, 40))
    assert decide(chunks, {"disk": idle}, Prefill(500.0), 256).num_chunks == 1
    assert decide(chunks, {"disk": busy}, Prefill(500.0), 256).num_chunks == 0


@pytest.mark.parametrize("field", ["tokens_per_s", "queue_s", "placement_bandwidth"])
def test_a_senseless_speed_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Prefill(**{"tokens_per_s": 1.0} | {field: -1.0})


def test_regret_is_what_the_other_choice_would_have_saved() -> None:
    prefill = Prefill(100.0)
    loads = Decision(2, 200, 300, load_s=0.5, first_token_s=1.5, other_s=3.0)
    regret = Regret()
    # As predicted: 0.5 s of loading and 1 s of computing instead of 3 s.
    assert regret.record(loads, 0.5, 200, prefill) == pytest.approx(-1.5)
    # Half came, late: 4 s and 2 s of computing, instead of 3 s.
    assert regret.record(loads, 4.0, 100, prefill) == pytest.approx(3.0)
    computes = Decision(0, 0, 300, 0.0, first_token_s=3.0, other_s=3.5)
    assert regret.record(computes, 0.0, 0, prefill) == pytest.approx(-0.5)
    # Prefill turned out half as fast as was thought.
    assert regret.record(computes, 0.0, 0, Prefill(50.0)) == pytest.approx(2.5)
    assert regret.record(replace(computes, other_s=math.inf), 0.0, 0, prefill) == 0.0
    assert regret == Regret(2, 3, pytest.approx(3.0), pytest.approx(1.5), pytest.approx(2.5), pytest.approx(0.5))


class _Place:
    """A level of the simulation: its true speed wanders, and what is known of it comes from reads alone."""

    def __init__(self, latency_s: float, bandwidth: float, readers: int) -> None:
        self.latency_s, self.bandwidth, self.readers = latency_s, bandwidth, readers
        self.estimate = TransferTime(Prior(latency_s, bandwidth))

    def seen(self, now: float) -> Source:
        line = self.estimate.line(now)
        return Source(line.latency_s, line.bandwidth, self.readers)

    def true(self, slowdown: float) -> Source:
        return Source(self.latency_s * slowdown, self.bandwidth / slowdown, self.readers)


def _mean_first_token_s(mode: ReuseMode, seed: int) -> float:
    """2,000 requests: prompts of 1 to 16 chunks at mixed places, S3 that is slow a third of the time, changing load."""
    dice = random.Random(seed)
    places = {
        "memory": _Place(1e-5, 8e9, 4),
        "disk": _Place(2e-4, 8e8, 4),
        "s3": _Place(3e-2, 8e7, 8),
    }
    total = 0.0
    for number in range(2000):
        now = number * 0.5
        slowdown = {"memory": 1.0, "disk": 1.0, "s3": 40.0 if number % 300 < 100 else 1.0}
        speed = Prefill(8000.0, queue_s=dice.choice((0.0, 0.0, 0.05, 0.5)), placement_bandwidth=5e9)
        count = dice.randint(1, 16)
        levels = sorted((dice.choice(LEVELS) for _ in range(count)), key=LEVELS.index)
        chunks = [Candidate(level, 256, 8 * MIB) for level in levels]
        prompt = _tokens(chunks, dice.randint(1, 1000))
        choice = decide(chunks, {name: place.seen(now) for name, place in places.items()}, speed, prompt, mode=mode)
        taken = chunks[: choice.num_chunks]
        actual = {name: place.true(slowdown[name] * dice.uniform(0.8, 1.25)) for name, place in places.items()}
        total += _cost(taken, actual, speed, prompt)
        for chunk in taken:
            source = actual[chunk.level]
            seconds = source.latency_s + chunk.num_bytes / source.bandwidth
            places[chunk.level].estimate.observe(chunk.num_bytes, seconds, now)
    return total / 2000


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_measuring_beats_always_and_never_on_a_mixed_trace(seed: int) -> None:
    measured, always, never = (_mean_first_token_s(mode, seed) for mode in ReuseMode)
    assert measured < 0.9 * always
    assert measured < 0.9 * never
