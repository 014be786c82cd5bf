"""Hand-offs of KV between engines: whether one may be used, and what became of each.

One engine computes a prompt and lends its chunks (prefill); another loads them and goes on (decode). A hand-off that
isn't honoured costs a computation and is never an error. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections import Counter, deque
from threading import Lock
from typing import Literal, get_args

from paceline_engine.messages import Handoff
from paceline_engine.records import Struct

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, ...] = get_args(Side)
Outcome = Literal[
    "lent", "short", "busy", "late", "aborted", "stale", "honoured", "namespace", "expired", "lease", "no_store"
]
# Of each side, in the order of their sentences.
OUTCOMES: dict[Side, tuple[Outcome, ...]] = {
    "prefill": ("lent", "short", "busy", "late", "aborted", "stale"),
    "decode": ("honoured", "namespace", "expired", "lease", "no_store"),
}
_SENTENCES: dict[Outcome, str] = {
    "lent": "{num_chunks} chunks are lent",
    "short": "nothing is lent: the prompt has no whole chunk",
    "busy": "nothing is lent: as many hand-offs are under way as may be",
    "late": "nothing is lent: no chunk reached the shared tier in time",
    "aborted": "nothing is lent: the request was ended meanwhile",
    "stale": "nothing is lent: the engine's KV was reset meanwhile",
    "honoured": "the lease of {num_chunks} chunks is taken over",
    "namespace": "computed: the chunks are of another model, precision or layout (namespace)",
    "expired": "computed: the lease has expired",
    "lease": "computed: the shared tier knows no such lease: it ended, or is of an earlier epoch, or can't be asked",
    "no_store": "computed: this engine has no tier that other engines reach",
}
MAX_RECENT = 256


class HandedOff(Struct, frozen=True, kw_only=True):
    """What became of one hand-off. at: in the clock of whoever noted it, Unix seconds."""

    request_id: str
    side: Side
    outcome: Outcome
    message: str
    at: float


def why_refused(handoff: Handoff, namespace: str, now: float) -> Outcome | None:
    """Why a hand-off can't be honoured, before the lease itself is asked for. now: Unix seconds."""
    if handoff.namespace != namespace:
        return "namespace"
    return "expired" if now >= handoff.expires_at else None


class HandoffBook:
    """Counts, and the latest MAX_RECENT hand-offs. Safe to call from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._recent: deque[HandedOff] = deque(maxlen=MAX_RECENT)
        self._lock = Lock()

    @property
    def counts(self) -> dict[str, int]:
        """How many, by "side outcome"."""
        with self._lock:
            return dict(self._counts)

    @property
    def recent(self) -> list[HandedOff]:
        """The latest ones, oldest first."""
        with self._lock:
            return list(self._recent)

    def note(self, request_id: str, side: Side, outcome: Outcome, now: float, num_chunks: int = 0) -> None:
        """One more."""
        message = _SENTENCES[outcome].format(num_chunks=num_chunks)
        with self._lock:
            self._counts[f"{side} {outcome}"] += 1
            self._recent.append(HandedOff(request_id=request_id, side=side, outcome=outcome, message=message, at=now))
