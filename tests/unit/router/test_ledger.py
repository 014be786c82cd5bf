"""The ledger: one end a request, judged by the right targets, counted under bounded labels."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from paceline_api import metrics
from paceline_api.slo import End, Targets, Verdict
from paceline_router.inflight import InFlight
from paceline_router.ledger import LABEL_VALUES_MAX, Entry, Ledger
from paceline_router.metrics import OVERFLOW, Instruments, LabelCap
from paceline_router.records import ServiceRecord, TenantRecord
from paceline_router.snapshot import Model, Snapshot

SERVICE = ServiceRecord("chat", "chat", "default", "leastLoaded", Targets(ttft_s=1.0, tpot_s=0.1), 0)


def entry(tenant: TenantRecord | None, first_s: float | None = 0.5, tokens: int = 11, streamed: bool = True) -> Entry:
    made = Entry(0.0, "r", tenant, SERVICE, streamed)
    made.meter.first_content_s = first_s
    made.meter.usage_tokens = tokens
    return made


def close(made: Entry, end: End = End.FINISHED, now: float = 1.0) -> Verdict | None:
    return Ledger(CollectorRegistry()).close(made, end, 200, now)


def test_the_services_promise_counts_where_the_tenant_has_none():
    assert close(entry(TenantRecord("a"))) is Verdict.GOOD
    assert close(entry(TenantRecord("a"), first_s=1.1), now=1.2) is Verdict.BAD_TTFT
    assert close(entry(TenantRecord("a")), now=1.6) is Verdict.BAD_TPOT


def test_the_tenants_own_promise_goes_before_and_its_override_before_that():
    strict, lenient = Targets(ttft_s=0.1), Targets(ttft_s=9.0)
    assert close(entry(TenantRecord("a", targets=strict))) is Verdict.BAD_TTFT
    assert close(entry(TenantRecord("a", targets=strict, overrides={"chat": lenient}))) is Verdict.GOOD
    assert close(entry(TenantRecord("a", targets=lenient, overrides={"other": strict}))) is Verdict.GOOD


def test_an_answer_sent_whole_is_judged_by_when_a_good_stream_would_have_ended():
    whole = {"first_s": None, "tokens": 11, "streamed": False}
    assert close(entry(TenantRecord("a"), **whole), now=1.9) is Verdict.GOOD
    assert close(entry(TenantRecord("a"), **whole), now=2.1) is Verdict.BAD_E2E


def test_leaving_before_the_first_token_was_due_is_excluded():
    assert close(entry(TenantRecord("a"), first_s=None), End.CANCELLED, 0.9) is Verdict.EXCLUDED
    assert close(entry(TenantRecord("a"), first_s=None), End.CANCELLED, 1.1) is Verdict.BAD_TTFT


def test_a_request_cannot_end_twice():
    ledger = Ledger(CollectorRegistry())
    made = entry(TenantRecord("a"))
    ledger.close(made, End.FINISHED, 200, 1.0)
    with pytest.raises(RuntimeError, match="ended twice"):
        ledger.close(made, End.FAILED, 500, 2.0)


def test_a_request_without_a_tenant_is_counted_but_not_judged():
    registry = CollectorRegistry()
    assert Ledger(registry).close(Entry(0.0, "r"), End.CLIENT_ERROR, 401, 1.0) is None
    labels = {"tenant": "", "model_name": "", "code": "401"}
    assert registry.get_sample_value("paceline_router_requests_total", labels) == 1


def test_attainment_is_good_over_valid():
    ledger = Ledger(CollectorRegistry())
    for end in (End.FINISHED, End.FINISHED, End.FINISHED, End.FAILED, End.CLIENT_ERROR):
        ledger.close(entry(TenantRecord("a")), end, 200, 1.0)
    ledger.close(entry(TenantRecord("b")), End.CLIENT_ERROR, 400, 1.0)
    tenants = ledger.summary()["tenants"]
    assert (tenants["a"]["valid"], tenants["a"]["good"], tenants["a"]["attainment"]) == (4, 3, 0.75)
    assert tenants["a"]["models"]["chat"]["outcomes"] == {"error": 1, "excluded": 1, "good": 3}
    assert tenants["b"]["attainment"] is None


def test_the_summary_says_whether_the_promised_share_was_met():
    ledger = Ledger(CollectorRegistry())
    for name, share in (("modest", 0.5), ("strict", 0.9)):
        for end in (End.FINISHED, End.FINISHED, End.FINISHED, End.FAILED):
            ledger.close(entry(TenantRecord(name, targets=Targets(share=share))), end, 200, 1.0)
    tenants = ledger.summary()["tenants"]
    met = {name: tenants[name]["models"]["chat"]["met"] for name in tenants}
    assert met == {"modest": True, "strict": False}


def test_histograms_hold_streams_that_finished():
    registry = CollectorRegistry()
    ledger = Ledger(registry)
    ledger.close(entry(TenantRecord("a")), End.FINISHED, 200, 1.5)
    ledger.close(entry(TenantRecord("a"), streamed=False), End.FINISHED, 200, 1.5)
    ledger.close(entry(TenantRecord("a")), End.FAILED, 502, 1.5)
    labels = {"tenant": "a", "model_name": "chat"}
    assert registry.get_sample_value("paceline_router_time_to_first_token_seconds_count", labels) == 1
    assert registry.get_sample_value("paceline_router_time_to_first_token_seconds_sum", labels) == 0.5
    assert registry.get_sample_value("paceline_router_time_per_output_token_seconds_sum", labels) == pytest.approx(0.1)


def test_tenants_beyond_the_cap_share_one_label():
    registry = CollectorRegistry()
    ledger = Ledger(registry)
    for number in range(LABEL_VALUES_MAX + 5):
        ledger.close(entry(TenantRecord(f"t{number}")), End.FINISHED, 200, 1.0)
    labels = {"tenant": OVERFLOW, "model_name": "chat", "code": "200"}
    assert registry.get_sample_value("paceline_router_requests_total", labels) == 5
    assert LabelCap(0).value("x") == OVERFLOW


def test_a_scrape_shows_configured_pairs_at_zero():
    registry = CollectorRegistry()
    tenants = {"a": TenantRecord("a"), "b": TenantRecord("b", services=frozenset({"other"}))}
    Ledger(registry).sample(Snapshot(models={"chat": Model(SERVICE)}, tenants=tenants), InFlight())
    name, labels = "paceline_router_slo_requests_total", {"model_name": "chat", "outcome": "good"}
    assert registry.get_sample_value(name, {"tenant": "a", **labels}) == 0
    assert registry.get_sample_value(name, {"tenant": "b", **labels}) is None


def test_every_catalogue_entry_becomes_an_instrument_of_its_exposed_name():
    registry = CollectorRegistry()
    Instruments(registry, metrics.CATALOGUE)
    names = {family.name for family in registry.collect()}
    assert names == {metric.name for metric in metrics.CATALOGUE}
