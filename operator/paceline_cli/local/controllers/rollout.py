"""How many pods of which template a Deployment should create and delete now. Pure.

The rules of the Deployment controller (`reconcileNewReplicaSet`, `reconcileOldReplicaSets`, `rolloutRecreate`), with
pods counted directly because there are no ReplicaSets between. Terminating pods count only for Recreate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from paceline_api.kube import Manifest
from paceline_cli.local.controllers.pods import available_in, deletion_rank, is_active, is_finished


@dataclass(frozen=True, slots=True)
class Bounds:
    """Resolved strategy. `recreate`: old pods go before new ones come."""

    desired: int
    max_surge: int
    max_unavailable: int
    recreate: bool


@dataclass(frozen=True, slots=True)
class Step:
    """`create` pods of the current template; `delete` these."""

    create: int
    delete: tuple[Manifest, ...]


def bounds(spec: Mapping[str, Any]) -> Bounds:
    """Percentages: surge rounds up, unavailable down; 0 and 0 would never move, so one may be unavailable."""
    desired = spec.get("replicas", 1)
    strategy = spec.get("strategy") or {}
    if strategy.get("type") == "Recreate":
        return Bounds(desired, 0, 0, True)
    rolling = strategy.get("rollingUpdate") or {}
    surge = ceil(_count(rolling.get("maxSurge", "25%"), desired))
    unavailable = floor(_count(rolling.get("maxUnavailable", "25%"), desired))
    if surge == 0 and unavailable == 0:
        unavailable = 1
    return Bounds(desired, surge, min(unavailable, desired), False)


def _count(value: int | str, total: int) -> float:
    if isinstance(value, int):
        return value
    # Whole numbers first: 0.07 * 100 is not 7 in floating point.
    return int(value.rstrip("%")) * total / 100


def step(limits: Bounds, current: Sequence[Manifest], old: Sequence[Manifest], min_ready_s: int, now: str) -> Step:
    """`current` and `old`: all pods of the current and of other templates, terminating and finished ones included."""
    new_active = [pod for pod in current if is_active(pod)]
    old_active = [pod for pod in old if is_active(pod)]
    if len(new_active) > limits.desired:
        surplus = sorted(new_active, key=deletion_rank)[: len(new_active) - limits.desired]
        return Step(0, (*surplus, *_old_to_delete(limits, new_active, old_active, min_ready_s, now)))
    if limits.recreate:
        if old_active:
            return Step(0, tuple(old_active))
        waiting = any(not is_finished(pod) for pod in old)
        return Step(0 if waiting else limits.desired - len(new_active), ())
    room = limits.desired + limits.max_surge - len(new_active) - len(old_active)
    create = max(0, min(limits.desired - len(new_active), room))
    return Step(create, _old_to_delete(limits, new_active, old_active, min_ready_s, now))


def _old_to_delete(
    limits: Bounds, new: Sequence[Manifest], old: Sequence[Manifest], min_ready_s: int, now: str
) -> tuple[Manifest, ...]:
    def available(pods: Sequence[Manifest]) -> list[Manifest]:
        return [pod for pod in pods if available_in(pod, min_ready_s, now) == 0]

    must_be_available = limits.desired - limits.max_unavailable
    new_unavailable = len(new) - len(available(new))
    room = len(new) + len(old) - must_be_available - new_unavailable
    if room <= 0:
        return ()
    healthy = available(old)
    # Old pods that serve nobody go first; healthy ones only as far as enough stay available.
    unhealthy = [pod for pod in sorted(old, key=deletion_rank) if pod not in healthy][:room]
    surplus = max(0, len(healthy) + len(available(new)) - must_be_available)
    spare = min(room - len(unhealthy), surplus)
    return (*unhealthy, *sorted(healthy, key=deletion_rank)[:spare])
