"""Which segment of a log gives way, and what of it is worth copying on. Must not do I/O.

FIFO with reinsertion: the oldest segment goes, and chunks that were used since they were written move to the log's
head, as in the main queue of S3-FIFO. At most half of a segment is copied, so that each one that goes makes room; one
that is used more than that gets another round, a few at a time. A segment that is mostly dead goes first, with all
that lives copied on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROUNDS = 4
"""How many well-used segments are passed over before the oldest goes all the same."""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A segment's number, its turn (small goes first), bytes of its records, and of those that can be found."""

    number: int
    turn: int
    size: int
    live: int

    @property
    def mostly_dead(self) -> bool:
        return 2 * self.live <= self.size

    @property
    def budget(self) -> int:
        """Bytes that may be copied on from it."""
        return self.size // 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A record of a segment that is to go. `uses` and `spared` count what hangs on it, too."""

    slot: int
    size: int
    uses: int
    spared: bool


def victims(segments: Iterable[SegmentFacts]) -> list[SegmentFacts]:
    """In the order in which they should go."""
    return sorted(segments, key=lambda facts: (not facts.mostly_dead, facts.turn))


@dataclass(frozen=True, slots=True)
class Keepers:
    """Slots to copy on. `lost_used`: chunks that were used and found no room among them."""

    slots: list[int]
    lost_used: int


def keepers(candidates: Sequence[Candidate], budget: int, *, keep_unused: bool) -> Keepers | None:
    """What to copy on, at most `budget` bytes: the spared, then by uses. None if the spared do not fit."""
    chosen: list[int] = []
    lost_used = 0
    for candidate in sorted(candidates, key=lambda record: (not record.spared, -record.uses)):
        if not (candidate.spared or candidate.uses or keep_unused):
            continue
        if candidate.size <= budget:
            budget -= candidate.size
            chosen.append(candidate.slot)
        elif candidate.spared:
            return None
        else:
            lost_used += candidate.uses > 0
    return Keepers(chosen, lost_used)
