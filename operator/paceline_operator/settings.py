"""The operator's settings, with units in their names. Nothing is read from the environment here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline_operator.planner.model import PlanSettings


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from. `wall` is Unix seconds, `monotonic` seconds that never jump."""

    wall: Callable[[], float]
    monotonic: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`namespace` None watches every namespace. Every interval is varied by up to 20 % where it repeats."""

    namespace: str | None = None
    plan: PlanSettings = field(default_factory=PlanSettings)
    workers: int = 2
    resync_s: float = 300.0
    # Soon after the start: what was deleted between the first lists and the start of the watches is reported by none.
    first_resync_s: float = 10.0
    status_interval_s: float = 30.0
    keys_max: int = 100_000
    stop_timeout_s: float = 10.0
    heartbeat_timeout_s: float = 120.0
    lease_namespace: str = "paceline-system"
    lease_name: str = "paceline-operator"
    lease_duration_s: float = 15.0
