"""The state machine of one probe, without time and without I/O.

Kubernetes semantics: a probe changes its verdict only after `failureThreshold` failures or `successThreshold` successes
in a row. Before the first verdict readiness counts as failed, liveness as passed, startup as not yet passed.
"""

from dataclasses import dataclass
from enum import Enum


class ProbeKind(Enum):
    """What a probe decides."""

    STARTUP = "Startup"
    READINESS = "Readiness"
    LIVENESS = "Liveness"


class Verdict(Enum):
    """What a recorded result changed."""

    UNCHANGED = "unchanged"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(slots=True)
class ProbeState:
    """Counts results of one probe of one run of a container; make a new one for each start."""

    kind: ProbeKind
    failure_threshold: int
    success_threshold: int
    passed: bool = False
    _streak_ok: bool | None = None
    _streak: int = 0

    def __post_init__(self) -> None:
        self.passed = self.kind is ProbeKind.LIVENESS

    def record(self, ok: bool) -> Verdict:
        """Counts one result. FAILED of a startup or liveness probe means: kill the container."""
        self._streak = self._streak + 1 if ok is self._streak_ok else 1
        self._streak_ok = ok
        if self._streak < (self.success_threshold if ok else self.failure_threshold):
            return Verdict.UNCHANGED
        # A startup probe starts as "not passed", so its failure is news although the flag does not change.
        changed = self.passed is not ok or (self.kind is ProbeKind.STARTUP and not ok)
        self.passed = ok
        if not changed:
            return Verdict.UNCHANGED
        return Verdict.PASSED if ok else Verdict.FAILED
