"""Conditions as kstatus reads them."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_api.conditions import Fact, Type, find, merge

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


def kstatus(conditions: list[dict[str, Any]], *, generation: int, observed: int | None) -> str:
    """The rules of sigs.k8s.io/cli-utils pkg/kstatus for a custom resource, first match wins."""
    if observed is not None and observed != generation:
        return "InProgress"
    for condition in conditions:
        if condition["type"] == "Reconciling" and condition["status"] == "True":
            return "InProgress"
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return "Failed"
    ready = find(conditions, "Ready")
    if ready is not None:
        return "Current" if ready["status"] == "True" else "InProgress"
    return "Current"


def facts(ready: bool | None, *, reconciling: bool = False, stalled: bool = False) -> list[Fact]:
    return [
        Fact(Type.READY, ready, "Reason", "message"),
        Fact(Type.RECONCILING, reconciling, "Progressing", ""),
        Fact(Type.STALLED, stalled, "Invalid", ""),
    ]


@pytest.mark.parametrize(
    ("given", "observed", "status"),
    [
        (facts(True), 1, "Current"),
        (facts(None), 1, "InProgress"),
        (facts(False), 1, "InProgress"),
        (facts(False, reconciling=True), 1, "InProgress"),
        (facts(False, stalled=True), 1, "Failed"),
        (facts(True), 0, "InProgress"),
    ],
)
def test_kstatus_reads_what_was_meant(given: list[Fact], observed: int, status: str) -> None:
    conditions = merge([], given, generation=1, now=EARLY)
    assert kstatus(conditions, generation=1, observed=observed) == status


def test_reconciling_and_stalled_are_absent_when_false() -> None:
    assert [condition["type"] for condition in merge([], facts(True), generation=1, now=EARLY)] == ["Ready"]


def test_a_transition_time_moves_only_when_the_status_flips() -> None:
    first = merge([], facts(False), generation=1, now=EARLY)
    same = merge(first, [Fact(Type.READY, False, "Other", "new words")], generation=2, now=LATE)
    flipped = merge(same, facts(True), generation=2, now=LATE)
    assert (same[0]["lastTransitionTime"], same[0]["reason"], same[0]["observedGeneration"]) == (EARLY, "Other", 2)
    assert flipped[0]["lastTransitionTime"] == LATE


def test_merging_the_same_facts_changes_nothing() -> None:
    first = merge([], facts(True), generation=1, now=EARLY)
    assert merge(first, facts(True), generation=1, now=LATE) == first


def test_reconciling_and_stalled_together_are_a_bug() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        merge([], facts(False, reconciling=True, stalled=True), generation=1, now=EARLY)
