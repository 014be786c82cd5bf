"""The ledger: every request is entered once, judged once and counted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from paceline_api import metrics
from paceline_api.slo import End, RequestRecord, Targets, Verdict, judge
from paceline_router.inflight import InFlight
from paceline_router.metrics import NONE, Instruments, LabelCap
from paceline_router.records import ServiceRecord, TenantRecord
from paceline_router.snapshot import Snapshot
from paceline_router.sse import StreamMeter

LABEL_VALUES_MAX = 200


@dataclass(slots=True)
class Entry:
    """One request from accept to end. Times in seconds on a monotonic clock; `end_s` is set by the ledger."""

    accept_s: float
    request_id: str
    tenant: TenantRecord | None = None
    service: ServiceRecord | None = None
    streamed: bool = False
    meter: StreamMeter = field(default_factory=StreamMeter)
    closed: bool = False


class Ledger:
    """Counts requests into the router's metrics, and keeps the sums behind `GET /slo`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.instruments = Instruments(registry, metrics.ROUTER)
        self._tenants = LabelCap(LABEL_VALUES_MAX)
        self._models = LabelCap(LABEL_VALUES_MAX)
        self._verdicts: dict[tuple[str, str], Counter[Verdict]] = {}
        self._shares: dict[tuple[str, str], float] = {}

    def close(self, entry: Entry, end: End, code: int, now: float) -> Verdict | None:
        """End a request. None for one that never got as far as a tenant. RuntimeError if it had ended before."""
        if entry.closed:
            raise RuntimeError(f"request {entry.request_id} ended twice")
        entry.closed = True
        tenant = self._tenants.value(entry.tenant.name) if entry.tenant else NONE
        model = self._models.value(entry.service.served_name) if entry.service else NONE
        self.instruments.counter("paceline_router_requests").labels(tenant, model, str(code)).inc()
        if entry.tenant is None:
            return None
        targets = entry.tenant.targets_for(entry.service) if entry.service else Targets()
        verdict = _verdict(entry, targets, end, now)
        self.instruments.counter("paceline_router_slo_requests").labels(tenant, model, verdict.value).inc()
        self._verdicts.setdefault((tenant, model), Counter())[verdict] += 1
        self._shares[tenant, model] = targets.share
        if end is End.FINISHED and entry.streamed:
            self._observe(entry, tenant, model, now)
        return verdict

    def _observe(self, entry: Entry, tenant: str, model: str, now: float) -> None:
        first_s = entry.meter.first_content_s
        if first_s is None:
            return
        ttft = self.instruments.histogram("paceline_router_time_to_first_token_seconds")
        ttft.labels(tenant, model).observe(first_s - entry.accept_s)
        if entry.meter.output_tokens > 1:
            tpot = self.instruments.histogram("paceline_router_time_per_output_token_seconds")
            tpot.labels(tenant, model).observe((now - first_s) / (entry.meter.output_tokens - 1))

    def refused(self, reason: str) -> None:
        self.instruments.counter("paceline_router_auth_refusals").labels(reason).inc()

    def upstream_error(self, model: str, reason: str) -> None:
        self.instruments.counter("paceline_router_upstream_errors").labels(self._models.value(model), reason).inc()

    def watch_restarted(self, kind: str) -> None:
        self.instruments.counter("paceline_router_watch_restarts").labels(kind).inc()

    def sample(self, snapshot: Snapshot, in_flight: InFlight) -> None:
        """Set the gauges for a scrape, and bring the counters of configured pairs into being at 0."""
        flight = self.instruments.gauge("paceline_router_requests_in_flight")
        states = self.instruments.gauge("paceline_router_endpoints")
        flight.clear()
        states.clear()
        slo = self.instruments.counter("paceline_router_slo_requests")
        for name, model in sorted(snapshot.models.items()):
            label = self._models.value(name)
            flight.labels(label).inc(sum(in_flight.at(endpoint.id) for endpoint in model.endpoints))
            counts = Counter(
                "ready" if endpoint.serving else "terminating" if endpoint.terminating else "not_ready"
                for endpoint in model.endpoints
            )
            for state in ("ready", "not_ready", "terminating"):
                states.labels(label, state).inc(counts[state])
            for tenant in snapshot.tenants.values():
                if tenant.may_use(model.service.name):
                    slo.labels(self._tenants.value(tenant.name), label, Verdict.GOOD.value)

    def summary(self) -> dict[str, Any]:
        """Per tenant and model since the start: verdicts, attainment (null without valid requests), promised share."""
        tenants: dict[str, Any] = {}
        for (tenant, model), verdicts in sorted(self._verdicts.items()):
            valid = sum(count for verdict, count in verdicts.items() if verdict.valid)
            models = tenants.setdefault(tenant, {"models": {}})["models"]
            attainment = verdicts[Verdict.GOOD] / valid if valid else None
            target = self._shares[tenant, model]
            models[model] = {
                "valid": valid,
                "good": verdicts[Verdict.GOOD],
                "attainment": attainment,
                "target": target,
                "met": None if attainment is None else attainment >= target,
                "outcomes": {verdict.value: count for verdict, count in sorted(verdicts.items())},
            }
        for totals in tenants.values():
            valid = sum(model["valid"] for model in totals["models"].values())
            good = sum(model["good"] for model in totals["models"].values())
            totals.update(valid=valid, good=good, attainment=good / valid if valid else None)
        return {"v": 1, "tenants": tenants}


def _verdict(entry: Entry, targets: Targets, end: End, now: float) -> Verdict:
    record = RequestRecord(
        accept_s=entry.accept_s,
        first_token_s=entry.meter.first_content_s if entry.streamed else None,
        end_s=now,
        output_tokens=entry.meter.output_tokens,
        end=end,
        streamed=entry.streamed,
    )
    return judge(record, targets)
