"""In-flight accounting: how many requests this router has at each endpoint.

A count exists only inside `track`, so no way out of a request can leak one. Used from one event loop, hence no lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from paceline_router.records import EndpointId


class InFlight:
    """Counts by endpoint. An endpoint without requests has no entry, so the table is as small as the load."""

    def __init__(self) -> None:
        self._counts: dict[EndpointId, int] = {}
        self._total = 0

    @contextmanager
    def track(self, endpoint: EndpointId) -> Iterator[None]:
        """One request at `endpoint` for as long as the context lasts."""
        self._counts[endpoint] = self._counts.get(endpoint, 0) + 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            left = self._counts[endpoint] - 1
            if left:
                self._counts[endpoint] = left
            else:
                del self._counts[endpoint]

    def at(self, endpoint: EndpointId) -> int:
        return self._counts.get(endpoint, 0)

    @property
    def total(self) -> int:
        return self._total

    @property
    def counts(self) -> Mapping[EndpointId, int]:
        """Endpoints with requests, also those that discovery has lost sight of."""
        return MappingProxyType(self._counts)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every entry is positive and they add up."""
        if any(count < 1 for count in self._counts.values()) or sum(self._counts.values()) != self._total:
            raise RuntimeError(f"in-flight counts do not add up to {self._total}: {self._counts}")
