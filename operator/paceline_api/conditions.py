"""Conditions with kstatus semantics: what is true now, merged over what was true before.

kstatus (sigs.k8s.io/cli-utils) reads a custom resource so: Reconciling=True is InProgress, Stalled=True is Failed,
then Ready decides. Therefore Reconciling and Stalled are present only while true, never both, and Ready is always
present. Pure: times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from paceline_api.kube import Manifest


class Type(StrEnum):
    READY = "Ready"
    MODEL_READY = "ModelReady"
    ENGINES_AVAILABLE = "EnginesAvailable"
    SCALING = "Scaling"
    SLO_MET = "SLOMet"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


ONLY_WHILE_TRUE = frozenset({Type.RECONCILING, Type.STALLED})


@dataclass(frozen=True, slots=True)
class Fact:
    """One condition as it is found now. `status` None is Unknown."""

    type: Type
    status: bool | None
    reason: str
    message: str


def _status_text(status: bool | None) -> str:
    return "Unknown" if status is None else str(status)


def merge(previous: Iterable[Manifest], facts: Iterable[Fact], *, generation: int, now: str) -> list[Manifest]:
    """The conditions list to write. `now` is RFC 3339; a transition time moves only when its status flips."""
    before = {str(condition.get("type")): condition for condition in previous}
    merged: list[Manifest] = []
    for fact in facts:
        if fact.type in ONLY_WHILE_TRUE and fact.status is not True:
            continue
        old = before.get(fact.type, {})
        status = _status_text(fact.status)
        kept = str(old.get("lastTransitionTime")) if old.get("status") == status else now
        merged.append(
            {
                "type": fact.type.value,
                "status": status,
                "observedGeneration": generation,
                "lastTransitionTime": kept,
                "reason": fact.reason,
                "message": fact.message,
            }
        )
    types = [condition["type"] for condition in merged]
    if Type.RECONCILING in types and Type.STALLED in types:
        raise ValueError("Reconciling and Stalled exclude each other: progress is possible or it is not")
    return merged


def find(conditions: Iterable[Manifest], type_: str) -> Manifest | None:
    """The condition of a type, if present."""
    return next((condition for condition in conditions if condition.get("type") == type_), None)
