"""The S3 tier before a server that misbehaves: nothing wrong is served, nothing acknowledged is lost, it comes back.

A proxy between tier and server does the misbehaving; the guard has the test's clock, so that nobody waits for breakers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy, Request

from paceline_kvstore import ChunkKey
from paceline_kvstore.breaker import BreakerLimits, State
from paceline_kvstore.codec import HEADER_BYTES
from paceline_kvstore.tiers.guarded import GuardedTier
from paceline_kvstore.tiers.s3 import S3Tier

Key = Callable[..., ChunkKey]
LIMITS = BreakerLimits(least=3)
RANGE = 65_536
STATE = os.urandom(4 * RANGE - HEADER_BYTES)

READ_FAULTS = {
    "403": Fault(403, "AccessDenied"),
    "500": Fault(500),
    "503": Fault(503, "SlowDown"),
    "refused": Fault(refuse=True),
    "cut": Fault(cut=30_000),
    "reset in the body": Fault(cut=30_000, reset=True),
    "cut before the body": Fault(cut=0),
    "a changed byte": Fault(flip=20_000),
    "a hang": Fault(hang=True),
    "a trickle": Fault(pause=0.05),
    "a stall": Fault(stall=30_000),
}
WRITE_FAULTS = {
    "500": Fault(500),
    "503": Fault(503, "SlowDown"),
    "503 with a pause": Fault(503, "SlowDown", headers="Retry-After: 0.01\r\n"),
    "409": Fault(409, "ConditionalRequestConflict"),
    "refused": Fault(refuse=True),
    "the answer is lost": Fault(swallow=True),
    "403": Fault(403, "AccessDenied"),
}


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def guarded(bench: Any, **settings: Any) -> tuple[GuardedTier, S3Tier, Clock]:
    clock = Clock()
    tier = bench.tier(**settings)
    return GuardedTier(tier, LIMITS, clock), tier, clock


def of(plan: dict[int, Fault], matters: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    """The nth request that matters meets the nth fault."""
    seen = iter(range(1 << 30))
    return lambda request: plan.get(next(seen)) if matters(request) else None


@pytest.mark.parametrize("what", READ_FAULTS)
def test_a_read_fault_is_a_miss_and_the_tier_comes_back(what: str, faulty: Any, proxy: FaultProxy, make_key: Key):
    assert faulty.tier().put(make_key(1), STATE, durable=True)
    guard, tier, clock = guarded(faulty, range_bytes=RANGE, read_deadline=0.3)
    proxy.plan = lambda request: READ_FAULTS[what] if request.is_get else None
    for _ in range(6):
        assert guard.get(make_key(1)) is None
        assert guard.contains([make_key(2)]) == 0
    asked = proxy.count("GET")
    if what != "a changed byte":
        assert guard.reads.state is State.OPEN or guard.reads.limit < LIMITS.concurrency
        assert tier.stats.errors > 0
    else:
        assert tier.quarantine.total > 0
    assert guard.get(make_key(1)) is None
    proxy.heal()
    assert proxy.count("GET") == asked or what in ("a changed byte", "503")
    clock.now += 60
    tries = 0
    while (payload := guard.get(make_key(1), deadline=30.0)) is None:
        tries += 1
        clock.now += 1
        assert tries < 5
    assert payload == STATE
    assert guard.contains([make_key(1)]) == 1
    assert guard.reads.state is State.CLOSED


@pytest.mark.parametrize("what", ["500", "refused", "cut", "reset in the body", "cut before the body"])
def test_a_passing_read_fault_is_retried_where_it_happened(what: str, faulty: Any, proxy: FaultProxy, make_key: Key):
    assert faulty.tier().put(make_key(1), STATE, durable=True)
    guard, tier, _ = guarded(faulty, range_bytes=RANGE, read_deadline=30.0, read_attempts=4)  # All may meet one range.
    proxy.plan = of({0: READ_FAULTS[what], 2: READ_FAULTS[what], 4: READ_FAULTS[what]}, lambda request: request.is_get)
    assert guard.get(make_key(1)) == STATE
    assert tier.stats.retries == 3
    assert proxy.count("GET") == 3 + 3


def test_retries_have_a_bound(faulty: Any, proxy: FaultProxy, make_key: Key):
    guard, _, _ = guarded(faulty, read_attempts=3)
    proxy.plan = lambda request: Fault(500)
    assert guard.get(make_key(1)) is None
    assert proxy.count("GET") == 3


def test_a_server_that_throttles_is_asked_less_and_not_again(faulty: Any, proxy: FaultProxy, make_key: Key):
    guard, tier, _ = guarded(faulty)
    proxy.plan = lambda request: Fault(503, "SlowDown")
    assert guard.get(make_key(1)) is None
    assert proxy.count("GET") == 1
    assert guard.reads.limit == LIMITS.concurrency // 2
    assert tier.stats.throttled == 1


def test_one_denial_stops_all_reads_at_once(faulty: Any, proxy: FaultProxy, make_key: Key):
    guard, tier, _ = guarded(faulty)
    proxy.plan = lambda request: Fault(403, "AccessDenied")
    assert [guard.get(make_key(n)) for n in range(10)] == [None] * 10
    assert (proxy.count("GET"), tier.stats.denied) == (1, 1)


@pytest.mark.parametrize("what", ["a hang", "a trickle"])
def test_a_read_past_its_deadline_is_given_up(what: str, faulty: Any, proxy: FaultProxy, make_key: Key):
    assert faulty.tier().put(make_key(1), STATE, durable=True)
    guard, tier, _ = guarded(faulty, read_deadline=600.0, read_timeout=500.0)
    proxy.plan = lambda request: READ_FAULTS[what]
    assert guard.get(make_key(1), deadline=0.1) is None
    assert guard.contains([make_key(1)], deadline=0.1) == 0
    assert tier.stats.abandoned == 2
    proxy.heal()
    assert guard.get(make_key(1), deadline=30.0) == STATE


def test_a_read_that_is_given_up_frees_its_connection(faulty: Any, proxy: FaultProxy, make_key: Key):
    assert faulty.tier().put(make_key(1), STATE, durable=True)
    guard, _, _ = guarded(faulty, read_workers=1, read_timeout=500.0)
    proxy.plan = lambda request: Fault(stall=30_000)
    assert guard.get(make_key(1), deadline=0.2) is None
    proxy.heal()
    assert guard.get(make_key(1), deadline=30.0) == STATE


def test_reads_hold_only_so_many_bytes(faulty: Any, proxy: FaultProxy, make_key: Key):
    writer = faulty.tier()
    assert writer.put(make_key(1), STATE, durable=True) and writer.put(make_key(2), b"small", durable=True)
    guard, _, _ = guarded(faulty, read_bytes=len(STATE))
    assert [guard.get(make_key(1)) for _ in range(10)] == [None] * 10  # By its header one byte too large.
    assert guard.get(make_key(2)) == b"small"
    assert guard.reads.state is State.CLOSED
    guard, _, _ = guarded(faulty, read_bytes=len(STATE) + HEADER_BYTES)
    for _ in range(3):  # What a read held is given back.
        assert guard.get(make_key(1)) == STATE


def test_a_straggler_is_overtaken_by_a_second_read(faulty: Any, proxy: FaultProxy, make_key: Key):
    assert faulty.tier().put(make_key(1), STATE, durable=True)
    tier = faulty.tier(range_bytes=RANGE, hedge_share=0.5)
    for _ in range(20):
        assert tier.get(make_key(1)) == STATE
    before = tier.stats
    for nth, fault in enumerate([Fault(hang=True), Fault(pause=5.0), Fault(stall=500)]):
        proxy.plan = of({nth: fault}, lambda request: request.is_get)
        assert tier.get(make_key(1), deadline=60.0) == STATE
    assert tier.stats.hedges_won - before.hedges_won >= 3
    assert tier.stats.retries == before.retries


@pytest.mark.parametrize("what", WRITE_FAULTS)
def test_a_passing_write_fault_loses_nothing(what: str, faulty: Any, proxy: FaultProxy, make_key: Key):
    tier = faulty.tier()
    proxy.plan = of(dict.fromkeys(range(5), WRITE_FAULTS[what]), lambda request: request.method in ("PUT", "POST"))
    assert tier.put(make_key(1), STATE, durable=True)
    assert tier.put(make_key(2), STATE)
    assert tier.flush()
    assert tier.stats.lost == 0
    for key in (make_key(1), make_key(2)):
        assert faulty.tier().get(key) == STATE


@pytest.mark.parametrize("what", [*WRITE_FAULTS, "a hang"])
def test_what_could_not_be_written_is_not_acknowledged(what: str, faulty: Any, proxy: FaultProxy, make_key: Key):
    tier = faulty.tier(drain_seconds=0.2, write_timeout=0.5)
    proxy.plan = lambda request: Fault(hang=True) if what == "a hang" else WRITE_FAULTS[what]
    assert not tier.put(make_key(1), STATE, durable=True)
    assert tier.put(make_key(2), STATE)
    assert not tier.flush()
    assert tier.get(make_key(2)) == STATE  # From the queue.
    proxy.heal()
    while not tier.flush():
        pass
    assert faulty.tier().get(make_key(2)) == STATE


def test_a_write_that_can_never_succeed_is_dropped_and_told(faulty: Any, proxy: FaultProxy, make_key: Key):
    tier = faulty.tier()
    assert tier.put(make_key(1), STATE, durable=True)
    proxy.plan = lambda request: Fault(400, "EntityTooLarge") if request.is_put else None
    assert not tier.put(make_key(2), STATE, durable=True)
    assert not tier.flush()
    assert tier.stats.lost == 1
    proxy.heal()
    assert tier.flush()  # Told once.
    assert tier.put(make_key(2), STATE, durable=True)


def test_what_waits_too_long_is_dropped(faulty: Any, proxy: FaultProxy, make_key: Key):
    tier = faulty.tier(queue_seconds=0.05, drain_seconds=30.0)
    proxy.plan = lambda request: Fault(500)
    assert not tier.put(make_key(1), STATE, durable=True)
    assert tier.stats.lost == 1


@pytest.mark.parametrize("nth", range(5))
def test_an_upload_in_parts_that_fails_leaves_none_behind(nth: int, faulty: Any, proxy: FaultProxy, make_key: Key):
    data = os.urandom(11 << 20)
    tier = faulty.tier(multipart_bytes=5 << 20, part_bytes=5 << 20)
    assert tier.put(make_key(9), STATE, durable=True)  # The probe for conditions is over.
    proxy.plan = of({nth: Fault(500)}, lambda request: request.method in ("PUT", "POST"))
    assert tier.put(make_key(1), data, durable=True)
    unfinished = faulty.client.list_multipart_uploads(Bucket="kvstore", Prefix=faulty.prefix)
    assert not unfinished.get("Uploads")
    assert faulty.tier().get(make_key(1)) == data


@pytest.mark.parametrize("answer", [Fault(501, "NotImplemented"), Fault(400, "InvalidArgument"), Fault(200)])
def test_a_server_that_knows_no_conditions_is_asked_before(
    answer: Fault, faulty: Any, proxy: FaultProxy, make_key: Key
):
    assert faulty.tier().put(make_key(1), STATE, durable=True)
    ignores = answer.status == 200  # It stores what the probe puts, whatever is there.

    def plan(request: Request) -> Fault | None:
        conditional = "if-none-match" in request.headers and ("probe" in request.path or not ignores)
        return answer if conditional else None

    proxy.plan = plan
    tier = faulty.tier()
    proxy.requests.clear()
    assert tier.put(make_key(1), STATE, durable=True)
    assert (tier.stats.existing, tier.stats.bytes_written) == (1, 0)
    assert tier.put(make_key(2), STATE, durable=True)
    assert tier.put(make_key(3), STATE, durable=True)
    assert sum("probe" in request.path for request in proxy.requests) == (2 if ignores else 1)  # Once.
    assert faulty.tier().contains([make_key(1), make_key(2), make_key(3)]) == 3


def test_an_outage_holds_writes_back_and_then_they_are_written(faulty: Any, proxy: FaultProxy, make_key: Key):
    assert faulty.tier().put(make_key(0), STATE, durable=True)
    guard, tier, clock = guarded(faulty, drain_seconds=0.1)
    proxy.plan = lambda request: Fault(refuse=True)
    for n in range(1, 10):
        assert guard.put(make_key(n), STATE)
        assert guard.get(make_key(100)) is None
    assert not guard.flush()
    proxy.heal()
    clock.now += 60
    while not guard.flush():
        pass
    assert tier.stats.lost == 0
    assert [guard.get(make_key(n)) for n in range(10)] == [STATE] * 10
    other = faulty.tier()
    assert other.contains([make_key(n) for n in range(11)]) == 10


def test_under_a_storm_of_faults_nothing_wrong_is_served_and_nothing_durable_lost(
    faulty: Any, proxy: FaultProxy, make_key: Key
):
    faults = [*READ_FAULTS.values(), *WRITE_FAULTS.values()]
    faults = [fault for fault in faults if not fault.hang and not fault.pause] + [Fault(hang=True)]
    dice = random.Random(7)
    proxy.plan = lambda request: dice.choice(faults) if dice.random() < 0.4 else None
    states = {n: os.urandom(dice.choice([10, 5000, 150_000])) for n in range(24)}
    tiers = [
        GuardedTier(faulty.tier(range_bytes=RANGE, read_deadline=0.3, write_timeout=0.3, linger=0.001), LIMITS)
        for _ in range(2)
    ]
    durable: set[int] = set()

    def work(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(20):
            n, tier = mine.randrange(24), mine.choice(tiers)
            if mine.random() < 0.5:
                parent = make_key(n - 1) if n % 8 else None
                is_durable = mine.random() < 0.3
                if tier.put(make_key(n), states[n], parent=parent, durable=is_durable) and (is_durable or tier.flush()):
                    durable.add(n)
            else:
                tier.contains([make_key(n) for n in range(n, 24)])
                payload = tier.get(make_key(n))
                assert payload is None or payload == states[n]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    proxy.heal()
    for tier in tiers:
        while not tier.flush():
            pass
        tier.close()
    reader = faulty.tier()
    for begin in range(0, 24, 8):
        reader.contains([make_key(n) for n in range(begin, begin + 8)])
    for n in sorted(durable):
        reader.contains([make_key(n)])
        assert reader.get(make_key(n)) == states[n], n
    assert durable
