"""What a prefix lookup knows: at once from memory, and later what slower levels answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.reuse import Candidate
from paceline_kvstore.tiered.level import Level


@dataclass(frozen=True, slots=True)
class Planned:
    """A chunk and the level that would be asked for it. `num_bytes` is what it should have."""

    key: ChunkKey
    level: Level
    num_bytes: int

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.level.name, self.key.num_tokens, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """Leading chunks of a prompt that the store has, in order. No promise that they stay."""

    chunks: tuple[Planned, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.key.num_tokens for chunk in self.chunks)

    def first(self, num_chunks: int) -> Plan:
        """The plan without its tail."""
        return Plan(self.chunks[:num_chunks])

    def tokens_by_level(self) -> dict[str, int]:
        """How many tokens would come from which level."""
        tokens: dict[str, int] = {}
        for chunk in self.chunks:
            tokens[chunk.level.name] = tokens.get(chunk.level.name, 0) + chunk.key.num_tokens
        return tokens


class Lookup:
    """The answer to a lookup. `plan` may be used at any time; it grows while `is_pending`."""

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        known: Sequence[Level],
        bytes_per_token: int,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_news = on_news
        self._keys = keys
        self._known = tuple(known)
        self._bytes_per_token = bytes_per_token
        self._answers: list[tuple[Level, int]] = []
        self._pending = 0
        self._changed = Condition()

    @property
    def is_pending(self) -> bool:
        """Whether some level has not answered yet."""
        return self._pending > 0

    def wait(self, seconds: float) -> bool:
        """Wait for all levels, for up to that long; whether all have answered."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    @property
    def plan(self) -> Plan:
        """What is known by now."""
        with self._changed:
            longest = max((found for _, found in self._answers), default=0)
            slow = [next(level for level, found in self._answers if found > index) for index in range(longest)]
        levels = (*self._known, *slow)
        return Plan(
            tuple(
                Planned(key, level, key.num_tokens * self._bytes_per_token)
                for key, level in zip(self._keys, levels, strict=False)
            )
        )

    def ask(self, level: Level, submit: Callable[[Callable[[int], None]], bool]) -> None:
        """Wait for one more level: `submit` starts the question and gets what to call with the answer, once.

        Levels are asked for all keys after those known at once; of two that have a chunk, the one asked first counts.
        """
        with self._changed:
            self._pending += 1
            place = len(self._answers)
            self._answers.append((level, 0))

        def answer(found: int) -> None:
            with self._changed:
                self._answers[place] = (level, found)
                self._pending -= 1
                self._changed.notify_all()
            self._on_news()

        if not submit(answer):
            answer(0)
