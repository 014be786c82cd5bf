"""The Lease: one holder at a time, judged on each process's own clock. Time is a number here."""

import itertools
import threading
import time

import pytest
from operator_samples import NAMESPACE

from paceline_api.kube import LEASE, KubeError
from paceline_cli.local.store import ObjectStore
from paceline_operator.leader import Leader
from paceline_operator.settings import Clock


class Times:
    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = Clock(wall=lambda: 1_700_000_000.0 + self.now, monotonic=lambda: self.now)


@pytest.fixture
def times():
    return Times()


@pytest.fixture
def leases():
    ids = itertools.count()
    return ObjectStore(now=lambda: "", new_uid=lambda: str(next(ids)), monotonic=time.monotonic)


def candidate(store, name, times):
    return Leader(store, NAMESPACE, "paceline-operator", name, times.clock, duration_s=15.0)


def holder(store):
    return store.get(LEASE, NAMESPACE, "paceline-operator")["spec"]


def test_the_first_candidate_leads_and_the_second_waits(leases, times):
    first, second = candidate(leases, "a", times), candidate(leases, "b", times)
    assert first.step()
    assert not second.step()
    times.now += 5
    assert first.step()
    assert not second.step()
    assert holder(leases)["holderIdentity"] == "a"
    assert holder(leases)["leaseTransitions"] == 0


def test_a_dead_holder_is_followed_after_the_leases_duration_without_a_change(leases, times):
    first, second = candidate(leases, "a", times), candidate(leases, "b", times)
    assert first.step()
    assert not second.step()
    times.now += 14.9
    assert not second.step()
    times.now += 0.2
    assert second.step()
    assert holder(leases)["leaseTransitions"] == 1
    assert not first.leading, "two processes would write"


def test_a_newcomer_waits_the_whole_duration_whatever_the_lease_says(leases, times):
    assert candidate(leases, "a", times).step()
    times.now += 1_000_000
    second = candidate(leases, "b", times)
    assert not second.step(), "the renew time of another machine's clock was believed"
    times.now += 15
    assert second.step()


def test_the_holder_gives_up_before_another_may_take_over(leases, times):
    first = candidate(leases, "a", times)
    assert first.step()
    times.now += 10.1
    assert not first.leading


def test_an_api_that_does_not_answer_is_survived_for_two_thirds_of_the_duration(leases, times):
    class Down:
        down = False

        def __getattr__(self, name):
            if self.down:
                raise KubeError(0, "ClusterUnreachable", "connection refused")
            return getattr(leases, name)

    client = Down()
    first = candidate(client, "a", times)
    assert first.step()
    client.down = True
    times.now += 5
    assert first.step()
    times.now += 5
    assert not first.step()


def test_a_released_lease_is_taken_at_once(leases, times):
    first, second = candidate(leases, "a", times), candidate(leases, "b", times)
    assert first.step()
    first.release()
    assert second.step()


def test_of_two_that_see_it_free_only_one_wins(leases, times):
    first, second = candidate(leases, "a", times), candidate(leases, "b", times)
    assert first.step()
    first.release()
    stale = leases.get(LEASE, NAMESPACE, "paceline-operator")

    class Stale:
        def __getattr__(self, name):
            return getattr(leases, name)

        def get(self, *_):
            return stale

    assert second.step()
    assert not candidate(Stale(), "c", times).step()


def test_run_calls_gained_once_and_lost_when_another_took_over(leases):
    told: list[str] = []
    # A duration short enough to see a loss, with the real clock.
    clock = Clock(wall=time.time, monotonic=time.monotonic)
    leader = Leader(leases, NAMESPACE, "paceline-operator", "a", clock, duration_s=0.3)

    def gained() -> None:
        told.append("gained")
        lease = leases.get(LEASE, NAMESPACE, "paceline-operator")
        spec = {**lease["spec"], "holderIdentity": "thief", "leaseDurationSeconds": 3600}
        leases.replace({**lease, "spec": spec})

    thread = threading.Thread(target=leader.run, args=(threading.Event(), gained, lambda: told.append("lost")))
    thread.start()
    thread.join(5.0)
    assert told == ["gained", "lost"]
