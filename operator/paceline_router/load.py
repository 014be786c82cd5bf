"""What engines report of their own load, so that a router counts the requests of other routers too.

An engine's number includes what this router has there, so only the rest is added to the router's own count, which is
always newer. A report that is too old counts for nothing. Pure: time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import isfinite

from paceline_router.records import EndpointId

FRESH_S = 3.0


@dataclass(frozen=True, slots=True)
class _Report:
    others: int
    time_s: float


class ReportedLoad:
    """Requests of others by endpoint. As large as the fleet: `keep` drops endpoints that are gone."""

    def __init__(self) -> None:
        self._reports: dict[EndpointId, _Report] = {}

    def record(self, endpoint: EndpointId, reported: int, own: int, now: float) -> None:
        """reported: requests that the engine has. own: those of them that this router had sent."""
        self._reports[endpoint] = _Report(max(0, reported - own), now)

    def others(self, endpoint: EndpointId, now: float) -> int:
        """Requests that others have there, 0 where nothing recent is known."""
        report = self._reports.get(endpoint)
        return report.others if report is not None and now - report.time_s <= FRESH_S else 0

    def keep(self, endpoints: Collection[EndpointId]) -> None:
        """Forget every endpoint that is not among these."""
        for endpoint in [known for known in self._reports if known not in endpoints]:
            del self._reports[endpoint]


def total_of(lines: Iterable[str], names: Collection[str]) -> int | None:
    """The sum of the samples of these families in Prometheus text, over all labels; None if there is none of them."""
    total, found = 0.0, False
    for line in lines:
        name = line.partition("{")[0].partition(" ")[0]
        if name not in names:
            continue
        try:
            # NAME{label="a b"} VALUE [TIMESTAMP]
            value = float((line.rpartition("}")[2] or line).replace(name, "", 1).split()[0])
        except (ValueError, IndexError):
            continue
        if isfinite(value):
            total, found = total + value, True
    return int(total) if found else None
