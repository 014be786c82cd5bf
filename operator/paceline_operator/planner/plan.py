"""The planner's only entry: `plan(observed, now, settings)`. Pure, deterministic, idempotent.

Executing a plan and planning again on what is then observed gives an empty plan, unless the world moved.
"""

from __future__ import annotations

from paceline_operator.planner.kv_store import plan_store
from paceline_operator.planner.model import (
    FleetObserved,
    Observed,
    Plan,
    PlanSettings,
    ServiceObserved,
    TenantObserved,
)
from paceline_operator.planner.router import plan_fleet
from paceline_operator.planner.service import plan_service
from paceline_operator.planner.tenant import plan_tenant


def plan(observed: Observed, now: float, settings: PlanSettings) -> Plan:
    """What to do about one object or fleet. `now` is Unix seconds and reaches transition times only."""
    if isinstance(observed, ServiceObserved):
        return plan_service(observed, now, settings)
    if isinstance(observed, FleetObserved):
        return plan_fleet(observed, now, settings)
    if isinstance(observed, TenantObserved):
        return plan_tenant(observed, now)
    return plan_store(observed, now, settings)
