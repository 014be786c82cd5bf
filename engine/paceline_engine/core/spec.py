"""Guessing tokens ahead: who guesses, and how many guesses are worth verifying.

A guess costs nothing but work: the device keeps it only while it agrees with what it would have said, so nothing here
can change an output. Lengths adapt by traffic class to measured acceptance and to the measured cost of a step; where
speculation would lose time it is off, and tried again now and then. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from paceline_engine.config import MAX_GUESSES
from paceline_engine.core.ngram import NgramIndex
from paceline_engine.core.request import Request
from paceline_engine.records import Struct

SpeculativeMethod = Literal["none", "ngram", "draft", "selfDraft"]

# Guesses of one step are at most this many, also where a grammar forces more.
MAX_DRAFT_TOKENS = MAX_GUESSES


def expected_tokens(acceptance: float, num_guesses: int) -> float:
    """Tokens a verification yields: (1 - a^(g+1)) / (1 - a), Leviathan et al., arXiv 2211.17192, equation 1."""
    if acceptance >= 1.0:
        return float(num_guesses + 1)
    return (1.0 - acceptance ** (num_guesses + 1)) / (1.0 - acceptance)


def speedup(acceptance: float, num_guesses: int, cost: float) -> float:
    """Expected tokens over time, against one token a step; `cost` is one guess's time over a step's (theorem 3.8)."""
    return expected_tokens(acceptance, num_guesses) / (num_guesses * cost + 1.0)


class SpeculationConfig(Struct, frozen=True, kw_only=True):
    """How to guess.

    num_tokens: guesses a step; None adapts up to max_tokens. draft_cost: time of one guess over a step's, where a model
    makes it. traffic_classes: (class, on) for classes that differ from the default, on. min_n, max_n: n-gram lengths.
    """

    method: SpeculativeMethod = "none"
    num_tokens: int | None = None
    max_tokens: int = 8
    draft_cost: float = 0.0
    traffic_classes: tuple[tuple[str, bool], ...] = ()
    min_n: int = 2
    max_n: int = 4

    def __post_init__(self) -> None:
        for name in ("num_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_DRAFT_TOKENS:
                raise ValueError(f"speculative {name} must be 1 to {MAX_DRAFT_TOKENS}, not {value}")
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"n-gram lengths must be 1 <= min <= max, not {self.min_n} and {self.max_n}")


class ClassRecord(Struct, frozen=True):
    """What one traffic class's guesses came to, as plain data."""

    traffic_class: str
    kept: float
    tried: float
    idle_asks: int
    probes_left: int


@dataclass(slots=True)
class _ClassRecord:
    """What one traffic class's guesses came to. `kept` and `tried` fade, so that they follow the traffic."""

    kept: float = 0.0
    tried: float = 0.0
    idle_asks: int = 0
    probes_left: int = 0


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since start. per_position[i]: how often guess i was kept."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    per_position: list[int] = field(default_factory=list[int])


class SpeculationPolicy:
    """How many guesses a request of a traffic class should have verified in its next step."""

    # Before anything is measured: as if this many guesses had been tried, this share of them kept.
    PRIOR_TRIED, PRIOR_KEPT = 4.0, 3.0
    FADE = 0.98
    # A class that is off tries again for a few steps after this many steps without.
    PROBE_AFTER, PROBE_STEPS, PROBE_TOKENS = 128, 4, 2
    MAX_CLASSES = 64

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.counters = SpeculationCounters()
        self._switched = dict(config.traffic_classes)
        self._records: dict[str, _ClassRecord] = {}
        # Of one guess more in each sequence, over a step without.
        self.guess_cost = config.draft_cost

    @property
    def is_on(self) -> bool:
        """Whether anybody guesses at all."""
        return self.config.method != "none"

    @property
    def proposes_ngrams(self) -> bool:
        """Whether guesses come from the request's own text."""
        return self.config.method == "ngram"

    @property
    def device_drafts(self) -> bool:
        """Whether the device makes the guesses."""
        return self.config.method in ("draft", "selfDraft")

    def drafts(self, request: Request, wanted: int, room: int) -> list[int]:
        """At most `room` guesses for a request: the device's, or up to `wanted` from the request's own text."""
        room = min(room, MAX_DRAFT_TOKENS)
        if room < 1:
            return []
        if request.draft_token_ids:
            return list(request.draft_token_ids[:room])
        if not self.proposes_ngrams or wanted < 1:
            return []
        if request.ngrams is None:
            request.ngrams = NgramIndex(self.config.min_n, self.config.max_n)
        return request.ngrams.propose(request.token_ids, min(wanted, room))

    def set_verification_cost(self, share: float) -> None:
        """Extra time of a step when each of its sequences verifies one guess more, over the step's time without."""
        self.guess_cost = self.config.draft_cost + max(0.0, share)

    def acceptance(self, traffic_class: str) -> float:
        """Measured share of guesses kept, of those whose predecessors were kept."""
        record = self._records.get(traffic_class) or self._records.get("") or _ClassRecord()
        return (record.kept + self.PRIOR_KEPT) / (record.tried + self.PRIOR_TRIED)

    def best_length(self, traffic_class: str) -> tuple[int, float]:
        """(guesses, gain): the length with the largest speed-up at measured acceptance and cost, and that speed-up."""
        acceptance = self.acceptance(traffic_class)
        fixed = self.config.num_tokens
        lengths = range(1, self.config.max_tokens + 1) if fixed is None else (fixed,)
        best = max(lengths, key=lambda length: speedup(acceptance, length, self.guess_cost))
        return best, speedup(acceptance, best, self.guess_cost)

    def num_wanted(self, traffic_class: str) -> int:
        """Guesses to make for the next step of a request of this class; 0 while its gain is below 1."""
        if self.config.method == "none" or not self._switched.get(traffic_class, True):
            return 0
        length, gain = self.best_length(traffic_class)
        if gain >= 1.0:
            return length
        record = self._record(traffic_class)
        record.idle_asks += 1
        if record.idle_asks >= self.PROBE_AFTER:
            record.idle_asks, record.probes_left = 0, self.PROBE_STEPS
            # Old evidence counts half, or a few probes could never outweigh it.
            record.kept, record.tried = record.kept / 2, record.tried / 2
        if record.probes_left > 0:
            record.probes_left -= 1
            return min(length, self.PROBE_TOKENS)
        return 0

    def observe(self, traffic_class: str, num_guesses: int, num_kept: int, learn: bool = True) -> None:
        """One verification: the first `num_kept` of `num_guesses` guesses were kept. `learn`: let lengths follow it."""
        counters = self.counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_guesses
        counters.num_accepted_tokens += num_kept
        while len(counters.per_position) < num_kept:
            counters.per_position.append(0)
        for position in range(num_kept):
            counters.per_position[position] += 1
        if not learn:
            return
        record = self._record(traffic_class)
        record.kept = record.kept * self.FADE + num_kept
        record.tried = record.tried * self.FADE + num_kept + (num_kept < num_guesses)

    def records(self) -> tuple[ClassRecord, ...]:
        """What each traffic class's guesses came to; with `guess_cost`, what lengths depend on."""
        return tuple(
            ClassRecord(name, record.kept, record.tried, record.idle_asks, record.probes_left)
            for name, record in self._records.items()
        )

    def restore(self, guess_cost: float, records: Iterable[ClassRecord]) -> None:
        """Go on from earlier measurements."""
        self.guess_cost = guess_cost
        for entry in records:
            record = _ClassRecord(entry.kept, entry.tried, entry.idle_asks, entry.probes_left)
            self._records[entry.traffic_class] = record

    def _record(self, traffic_class: str) -> _ClassRecord:
        record = self._records.get(traffic_class)
        if record is None:
            # Names come from clients; beyond the bound they share one record.
            name = traffic_class if len(self._records) < self.MAX_CLASSES else ""
            record = self._records.setdefault(name, _ClassRecord())
        return record
