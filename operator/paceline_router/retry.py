"""Bounds on retries: a budget over all requests, and a pause for endpoints that could not be reached.

Pure: time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_router.records import EndpointId


@dataclass(slots=True)
class RetryBudget:
    """Each request earns `ratio` of a retry, saved up to `burst`; a retry costs one.

    So a failing fleet sees at most 1 + ratio times the offered load, whatever the clients do.
    """

    ratio: float = 0.2
    burst: float = 20.0
    balance: float = field(init=False)

    def __post_init__(self) -> None:
        self.balance = self.burst

    def earn(self) -> None:
        self.balance = min(self.burst, self.balance + self.ratio)

    def spend(self) -> bool:
        """Whether a retry is allowed now; takes its price if so."""
        if self.balance < 1.0:
            return False
        self.balance -= 1.0
        return True


@dataclass(slots=True)
class CoolDown:
    """Endpoints that just failed. They are chosen only when there is no other, until `pause_s` has passed.

    Without it least-loaded would prefer a dead endpoint, which never has a request in flight.
    """

    pause_s: float = 2.0
    limit: int = 4096
    _until: dict[EndpointId, float] = field(default_factory=dict[EndpointId, float])

    def add(self, endpoint: EndpointId, now: float) -> None:
        if len(self._until) >= self.limit:
            self._until = {key: until for key, until in self._until.items() if until > now}
        if len(self._until) < self.limit:
            self._until[endpoint] = now + self.pause_s

    def active(self, endpoint: EndpointId, now: float) -> bool:
        until = self._until.get(endpoint)
        if until is None:
            return False
        if until > now:
            return True
        del self._until[endpoint]
        return False
