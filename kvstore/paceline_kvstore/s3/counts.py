"""What the S3 tier counts beyond every tier's counts. Must not do I/O."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from threading import Lock

from paceline_kvstore.breaker import Outcome
from paceline_kvstore.errors import TierFault
from paceline_kvstore.stats import TierStats


@dataclass(slots=True)
class S3Stats(TierStats):
    """Counts since the tier was made.

    `puts` are chunks known to be durable; `existing` those of them that were there already. `dropped` puts found the
    queue full, `lost` ones were taken into it and never became durable. `abandoned` reads passed their deadline,
    `retries` and `hedges` are further requests for the same range, `hedges_won` those that came first. `denied` and
    `throttled` are errors of that kind, also counted in `errors`. `bytes_read` and `bytes_written` are of objects.
    """

    existing: int = 0
    dropped: int = 0
    lost: int = 0
    abandoned: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    denied: int = 0
    throttled: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class Counts:
    """The stats and their lock."""

    def __init__(self) -> None:
        self._stats = S3Stats()
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to the counts of those names."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def add_fault(self, fault: TierFault) -> None:
        """Count a request that failed."""
        self.add(
            errors=1, denied=int(fault.outcome is Outcome.DENIED), throttled=int(fault.outcome is Outcome.THROTTLED)
        )

    def copy(self) -> S3Stats:
        with self._lock:
            return replace(self._stats)


assert all(field.type in (int, "int") for field in fields(S3Stats))
