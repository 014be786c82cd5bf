"""Rounds of the KV store's benchmarks: every action once a round, in turning order, and ratios of a round alone."""

from __future__ import annotations

import pytest
from kv_rounds import Round, compare, measure
from report import Report


def test_each_round_runs_every_action_once_and_begins_with_another():
    ran: list[str] = []

    def action(name: str, seconds: float):
        def run() -> float:
            ran.append(name)
            return seconds

        return run

    rounds = measure({"ours": action("ours", 1.0), "limit": action("limit", 2.0)}, 3, lambda: ran.append("before"))
    warm, timed = ran[:4], ran[4:]
    assert warm == ["before", "ours", "before", "limit"]
    assert timed == ["before", "ours", "limit", "before", "limit", "ours", "before", "ours", "limit"]
    assert [one.seconds for one in rounds] == [{"ours": 1.0, "limit": 2.0}] * 3


def test_a_ratio_above_one_means_that_ours_is_faster_and_a_slow_machine_changes_nothing():
    report = Report("test")
    rounds = [Round({"ours": slow * 1.0, "limit": slow * 0.9, "peer": slow * 3.0}, 0.0) for slow in (1, 50, 7)]
    compare(report, "case", 9 * 10**9, rounds, {"limit": 0.95, "peer": 1.5})
    bars = {bar.name: bar.document() for bar in report.bars}
    assert bars["case: x limit"]["value"] == pytest.approx(0.9)
    assert not bars["case: x limit"]["holds"]
    assert bars["case: x peer"]["value"] == pytest.approx(3.0)
    assert bars["case: x peer"]["holds"]
    bandwidth = next(row for row in report.rows if row.metric == "bandwidth" and row.peer_name == "limit")
    assert (bandwidth.ours, bandwidth.peer) == (pytest.approx(9 / 7, abs=1e-3), pytest.approx(9 / 6.3, abs=1e-3))
