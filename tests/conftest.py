"""What every test session shares: skips are failures where CI promises that the components are there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Tables of cases that several rooms of the tests share.
sys.path.insert(0, str(Path(__file__).resolve().parent))

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

# No deadline: machines are shared and timings noisy. CI draws the same examples each time.
settings.register_profile("house", deadline=None, derandomize=IN_CI)
settings.load_profile("house")

MUST_RUN = ("kube", "engine", "e2e", "native")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    promised = [name for name in MUST_RUN if item.get_closest_marker(name)]
    if report.skipped and promised and IN_CI and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"a {promised[0]} test must not be skipped in CI: {reason}"
    return report
