"""One load of stored KV: chunks that the store delivers, placed into blocks in their order. Imports no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from paceline_engine.core.stored_kv import Arrived, ChunkLoad
from paceline_kvstore.policy.reuse import Decision, Prefill
from paceline_kvstore.tiered.fetch import Fetch

logger = logging.getLogger(__name__)


class PlacesChunks(Protocol):
    """A device into whose blocks chunks can be copied."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def write(self, block_ids: Sequence[int], num_tokens: int, payload: memoryview, skipped: int = 0) -> None:
        """Copy a chunk into blocks, but its first `skipped` tokens."""
        ...


class PrefixLoad:
    """A load under way. Whoever makes it sets `fetch` before anything is placed.

    num_placed: leading chunks that are in their blocks. Safe to call from several threads; `place` from one at a time,
    as `ask` arranges it.
    """

    def __init__(
        self, asked: ChunkLoad, decision: Decision, prefill: Prefill, device: PlacesChunks, chunk_tokens: int
    ) -> None:
        self.fetch: Fetch | None = None
        self.decision = decision
        self.prefill = prefill
        self.num_placed = 0
        self._asked = asked
        self._device = device
        self._chunk_tokens = chunk_tokens
        self._changed = threading.Condition()
        self._begun = self._placed_at = time.monotonic()
        self._placing_s = 0.0
        self._num_bytes = 0
        self._num_told = 0
        self._is_placing = False
        self._has_news = False
        self._is_writing = False
        self._is_ended = False

    @property
    def seconds(self) -> float:
        """From the beginning until what came was placed."""
        return (time.monotonic() if self.is_late else self._placed_at) - self._begun

    @property
    def is_late(self) -> bool:
        """Whether it ended at its deadline, with chunks still to come."""
        return time.monotonic() - self._begun >= self._asked.deadline_s and self.num_placed < self._num_chunks

    @property
    def placement(self) -> float | None:
        """Bytes per second at which chunks were copied into blocks; None if none was."""
        return self._num_bytes / self._placing_s if self._placing_s > 0.0 else None

    @property
    def _num_chunks(self) -> int:
        return len(self._asked.chain) - self._asked.first

    def ask(self) -> bool:
        """There is something to place: whether the caller must see to it that `place` is called."""
        with self._changed:
            self._has_news = True
            if self._is_placing or self._is_ended:
                return False
            self._is_placing = True
            return True

    def place(self) -> bool:
        """Place what has come until there is nothing more for now; whether the load is over then."""
        assert self.fetch is not None
        while True:
            with self._changed:
                self._has_news = False
            try:
                self._place_arrived(self.fetch)
            except Exception:
                logger.exception("a chunk of KV can't be copied into its blocks; it is computed")
                self.fetch.cancel()
                with self._changed:
                    self._is_ended = True
            with self._changed:
                if self._has_news and not self._is_ended:
                    continue
                self._is_placing = False
                return self._is_over

    def poll(self) -> Arrived | None:
        """How far the load is, if that is news."""
        with self._changed:
            num_placed, is_over = self.num_placed, self._is_over
        if not is_over and num_placed == self._num_told:
            return None
        self._num_told = num_placed
        assert self.fetch is not None
        tiers = self.fetch.sources[:num_placed]
        return Arrived(request_id=self._asked.request_id, tiers=tiers, is_over=is_over)

    def cancel(self) -> None:
        """Afterwards no block is written."""
        with self._changed:
            self._is_ended = True
        if self.fetch is not None:
            self.fetch.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing)

    @property
    def _is_over(self) -> bool:
        if self._is_placing or self.fetch is None:
            return False
        return self._is_ended or (self.fetch.is_done and self.num_placed >= self.fetch.num_leading)

    def _place_arrived(self, fetch: Fetch) -> None:
        size, asked = self._device.block_size, self._asked
        num_blocks = self._chunk_tokens // size
        for _, lease in fetch.poll():
            with lease as payload:
                with self._changed:
                    if self._is_ended:
                        return
                    self._is_writing = True
                index, begin = self.num_placed, time.monotonic()
                try:
                    block_ids = asked.block_ids[index * num_blocks : (index + 1) * num_blocks]
                    skipped = asked.num_present * size if index == 0 else 0
                    self._device.write(block_ids, self._chunk_tokens, payload, skipped)
                finally:
                    with self._changed:
                        self._is_writing = False
                        self._changed.notify_all()
                self._num_bytes += payload.nbytes
            with self._changed:
                self.num_placed += 1
                self._placed_at = time.monotonic()
                self._placing_s += self._placed_at - begin
