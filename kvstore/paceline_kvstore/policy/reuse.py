"""Reuse or recompute: how many leading chunks to load, when the rest of a prompt is computed anyway. Pure.

The first token can come when the loaded chunks are in place and prefill has its turn, and after prefill of the rest:

    first token after loading k chunks = max(loaded(k), queue) + (tokens - tokens of k chunks) / prefill speed

A chunk's arrival follows from its level's live speed and queue; chunks are placed on the device one after the other:

    arrival(j) = lookup + waves of reads until j * seconds of one read
    loaded(k) = max over j < k (arrival(j) + placing j to k - 1)

The k with the earliest first token is chosen among those that are loaded before the deadline. So a busy engine, whose
queue hides the loading, loads from slower places than an idle one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ReuseMode(StrEnum):
    """MEASURED compares predictions; ALWAYS loads whatever is there before the deadline; NEVER loads nothing."""

    MEASURED = "measured"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Source:
    """A level as it is now: seconds and bytes per second of one read, reads at a time, reads under way or waiting."""

    latency_s: float
    bandwidth: float
    readers: int = 1
    queued: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One chunk that could be loaded: from which level, how many tokens and bytes."""

    level: str
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """The engine as it is now: speed in tokens per second, seconds until a new request's prefill begins.

    placement_bandwidth: bytes per second at which loaded chunks are copied to where the engine wants them.
    """

    tokens_per_s: float
    queue_s: float = 0.0
    placement_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (self.tokens_per_s > 0 and self.queue_s >= 0 and self.placement_bandwidth > 0):
            raise ValueError(f"speeds must be above 0 and the queue not negative: {self}")

    def first_token_s(self, loaded_s: float, num_tokens: int) -> float:
        """When the first token comes if that many tokens are left to compute."""
        return max(loaded_s, self.queue_s) + num_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Decision:
    """Load `num_chunks`, all placed after `load_s`, first token after `first_token_s`; all in seconds, predicted.

    other_s: the first token after the best choice of the other kind (nothing loaded; or, when nothing is loaded, the
    best that loads something; infinite if there was none).
    """

    num_chunks: int
    num_tokens_loaded: int
    num_tokens: int
    load_s: float
    first_token_s: float
    other_s: float


def decide(
    candidates: Sequence[Candidate],
    sources: Mapping[str, Source],
    prefill: Prefill,
    num_tokens: int,
    *,
    lookup_s: float = 0.0,
    deadline_s: float = math.inf,
    mode: ReuseMode = ReuseMode.MEASURED,
) -> Decision:
    """How many of the leading chunks to load.

    num_tokens: tokens to have before the first one comes, those of the candidates included. lookup_s: what is left
    of the lookup. deadline_s: no chunk that comes later is waited for. Of equal predictions, more is loaded: it frees
    the engine.
    """
    nothing = Decision(0, 0, num_tokens, 0.0, prefill.first_token_s(0.0, num_tokens), math.inf)
    if mode is ReuseMode.NEVER:
        return nothing
    best: Decision | None = None
    tokens = 0
    loads = loaded_after(candidates, sources, prefill.placement_bandwidth, lookup_s)
    for count, (candidate, load_s) in enumerate(zip(candidates, loads, strict=True), start=1):
        tokens += candidate.num_tokens
        if load_s > deadline_s:
            break
        first_s = prefill.first_token_s(load_s, max(num_tokens - tokens, 0))
        if best is None or mode is ReuseMode.ALWAYS or first_s <= best.first_token_s:
            best = Decision(count, tokens, num_tokens, load_s, first_s, nothing.first_token_s)
    if best is None:
        return nothing
    if mode is ReuseMode.ALWAYS or best.first_token_s <= nothing.first_token_s:
        return best
    return Decision(0, 0, num_tokens, 0.0, nothing.first_token_s, best.first_token_s)


def loaded_after(
    candidates: Sequence[Candidate], sources: Mapping[str, Source], placement_bandwidth: float, lookup_s: float
) -> Iterator[float]:
    """Seconds until the first 1, 2, ... candidates are in place. KeyError for a level that is not in `sources`."""
    asked: dict[str, int] = {}
    placed_s = lookup_s
    for candidate in candidates:
        source = sources[candidate.level]
        before = source.queued + asked.get(candidate.level, 0)
        asked[candidate.level] = asked.get(candidate.level, 0) + 1
        waves = before // source.readers + 1
        arrival_s = lookup_s + waves * (source.latency_s + candidate.num_bytes / source.bandwidth)
        placed_s = max(placed_s, arrival_s) + candidate.num_bytes / placement_bandwidth
        yield placed_s


@dataclass(slots=True)
class Regret:
    """Decisions and what they cost beside the other choice, as far as is known: seconds of time to first token.

    lost_s: sum over decisions that the other choice would have beaten; won_s: sum over the rest.
    """

    loaded: int = 0
    computed: int = 0
    loaded_lost_s: float = 0.0
    loaded_won_s: float = 0.0
    computed_lost_s: float = 0.0
    computed_won_s: float = 0.0

    def record(self, decision: Decision, load_s: float, num_tokens_loaded: int, prefill: Prefill) -> float:
        """What became of a decision; the seconds lost, negative if won.

        load_s: seconds until what arrived in time was in place. num_tokens_loaded: how much that was. `prefill`: the
        speed and queue that there were. The other choice is measured by them, too; only loads that were never made
        count as predicted.
        """
        if decision.num_chunks:
            actual_s = prefill.first_token_s(load_s, max(decision.num_tokens - num_tokens_loaded, 0))
            lost_s = actual_s - prefill.first_token_s(0.0, decision.num_tokens)
            self.loaded += 1
            self.loaded_lost_s += max(lost_s, 0.0)
            self.loaded_won_s += max(-lost_s, 0.0)
            return lost_s
        self.computed += 1
        if math.isinf(decision.other_s):
            return 0.0
        lost_s = prefill.first_token_s(0.0, decision.num_tokens) - decision.other_s
        self.computed_lost_s += max(lost_s, 0.0)
        self.computed_won_s += max(-lost_s, 0.0)
        return lost_s
