"""Stored prefixes over one tier of the key-value store: reads and writes in threads of their own, away from the steps.

Implements `core.stored_kv.StoredKV`. The tier must answer `contains` from memory. Whatever is wrong with the tier is a
miss, and its chunks are computed. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from paceline_engine.core.stored_kv import Arrived, ChunkLoad
from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.base import Tier

NUM_READERS = 2
# Chunks that wait to be written, their bytes in memory; what is offered beyond that is not kept.
MAX_WRITES = 16

logger = logging.getLogger(__name__)


class CopiesChunks(Protocol):
    """A device whose KV can be copied out of its blocks and back; see `kv_chunks.ChunkCopier`."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a chunk."""
        ...

    def new_buffer(self, num_tokens: int) -> memoryview:
        """Memory for a chunk."""
        ...

    def read_later(self, block_ids: Sequence[int], num_tokens: int) -> Callable[[], Buffer]:
        """A chunk's bytes, when they are asked for; the blocks may change meanwhile."""
        ...

    def write(self, block_ids: Sequence[int], num_tokens: int, payload: memoryview, skipped: int = 0) -> None:
        """Copy a chunk into blocks, but its first `skipped` tokens."""
        ...


class _Load:
    """A load under way. Chunks from `end` on are of no use any more; num_writing threads are at its blocks."""

    def __init__(self, asked: ChunkLoad) -> None:
        self.asked = asked
        self.end = len(asked.chain) - asked.first
        self.arrived = [False] * self.end
        self.num_writing = 0
        self.num_told = 0

    @property
    def num_leading(self) -> int:
        return next((index for index in range(self.end) if not self.arrived[index]), self.end)

    @property
    def is_over(self) -> bool:
        return self.num_leading == self.end and self.num_writing == 0


class TierStore:
    """`close` it: it has threads, and closes the tier. name: of the tier, as clients hear of it.

    num_offered, num_dropped: chunks offered that the tier lacked, and those of them that found no room to wait.
    """

    def __init__(self, tier: Tier, name: str, copier: CopiesChunks, namespace_digest: str, chunk_tokens: int) -> None:
        self.num_offered = 0
        self.num_dropped = 0
        self._tier = tier
        self._name = name
        self._copier = copier
        self._namespace = bytes.fromhex(namespace_digest)
        self._chunk_tokens = chunk_tokens
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="kv-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")
        self._buffers = threading.local()
        self._changed = threading.Condition()
        self._loads: dict[str, _Load] = {}
        self._writing: set[bytes] = set()
        self._erasures: deque[Callable[[], object]] = deque()
        self._patient_until = 0.0
        self._tell: Callable[[], None] = _tell_nobody

    @property
    def bytes_used(self) -> int:
        """Bytes that the tier holds."""
        return self._tier.bytes_used

    def on_news(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, in any thread, when `poll` has a load that is over."""
        self._tell = tell

    def find(self, request_id: str, chain: Sequence[bytes], first: int) -> int | None:
        """How many leading chunks to load: those there are. The ones before `first` are not needed."""
        with self._changed:
            if self._erasures:
                return 0
        return first + self._tier.contains([self._key(link) for link in chain[first:]])

    def begin(self, load: ChunkLoad) -> None:
        """Have the readers fetch the chunks, in order."""
        made = _Load(load)
        with self._changed:
            self._loads[load.request_id] = made
        for index in range(made.end):
            self._readers.submit(self._fetch, made, index)

    def poll(self) -> list[Arrived]:
        """Loads that have come on since the last call."""
        news: list[Arrived] = []
        with self._changed:
            for request_id, load in list(self._loads.items()):
                num_leading, is_over = load.num_leading, load.is_over
                if is_over or num_leading > load.num_told:
                    load.num_told = num_leading
                    tiers = (self._name,) * num_leading
                    news.append(Arrived(request_id=request_id, tiers=tiers, is_over=is_over))
                if is_over:
                    del self._loads[request_id]
        return news

    def cancel(self, request_id: str) -> None:
        """Wait until no thread is at the load's blocks; none will be."""
        with self._changed:
            load = self._loads.pop(request_id, None)
            if load is not None:
                load.end = 0
                self._changed.wait_for(lambda: load.num_writing == 0)

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int]) -> None:
        """Have the writer put the chunk into the tier, if it lacks it and not too many wait."""
        chunk = self._key(key)
        if self._tier.contains([chunk]):
            return
        with self._changed:
            if key in self._writing:
                return
            self.num_offered += 1
            patience = max(0.0, self._patient_until - time.monotonic())
            if not self._changed.wait_for(lambda: len(self._writing) < MAX_WRITES, patience):
                self.num_dropped += 1
                return
            self._writing.add(key)
        content = self._copier.read_later(block_ids, self._chunk_tokens)
        self._writer.submit(self._put, chunk, None if parent is None else self._key(parent), content)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete chunks, after what is being written; nothing is found until that is done."""
        self._erase(lambda: [self._tier.delete(self._key(key)) for key in keys])

    def clear(self) -> None:
        """Delete all chunks of this namespace, after what is being written; nothing is found until that is done."""
        self._erase(lambda: self._tier.clear(namespace=self._namespace))

    def drain(self, seconds: float) -> None:
        """The engine ends: `offer` waits for room now, and `close` for writes, together so long."""
        self._patient_until = time.monotonic() + seconds

    def close(self) -> bool:
        """End, after `drain` when all is written or its time is up; False if chunks that were offered are lost."""
        with self._changed:
            for load in self._loads.values():
                load.end = 0
            patience = max(0.0, self._patient_until - time.monotonic())
            is_done = self._changed.wait_for(lambda: not self._writing, patience)
            num_lost = len(self._writing)
        if not is_done:
            logger.warning("%d chunks of KV weren't written to %s in time", num_lost, self._name)
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        while self._erasures:  # A restart must not bring it back.
            self._erase_next()
        self._tier.close()
        return is_done

    def _key(self, link: bytes) -> ChunkKey:
        return ChunkKey(self._namespace, link, self._chunk_tokens)

    def _fetch(self, load: _Load, index: int) -> None:
        """In a reader's thread: a chunk on its way into its blocks."""
        is_there = False
        try:
            is_there = self._read(load, index)
        except Exception:
            logger.exception("a chunk of KV can't be loaded from %s; it is computed", self._name)
        with self._changed:
            if is_there:
                load.arrived[index] = True
            else:
                load.end = min(load.end, index)
            is_over = load.is_over
            self._changed.notify_all()
        if is_over:
            self._tell()

    def _read(self, load: _Load, index: int) -> bool:
        asked = load.asked
        if index >= load.end:
            return False
        buffer = self._buffer()
        if self._tier.read_into(self._key(asked.chain[asked.first + index]), buffer) != len(buffer):
            return False
        size = self._copier.block_size
        num_blocks = self._chunk_tokens // size
        skipped = asked.num_present * size if index == 0 else 0
        with self._changed:
            if index >= load.end:
                return False
            load.num_writing += 1
        try:
            block_ids = asked.block_ids[index * num_blocks : (index + 1) * num_blocks]
            self._copier.write(block_ids, self._chunk_tokens, buffer, skipped)
        finally:
            with self._changed:
                load.num_writing -= 1
                self._changed.notify_all()
        return True

    def _buffer(self) -> memoryview:
        """This thread's."""
        if not hasattr(self._buffers, "buffer"):
            self._buffers.buffer = self._copier.new_buffer(self._chunk_tokens)
        return self._buffers.buffer

    def _put(self, key: ChunkKey, parent: ChunkKey | None, content: Callable[[], Buffer]) -> None:
        try:
            self._tier.put(key, content(), parent=parent)
        except Exception:
            logger.exception("a chunk of KV can't be written to %s", self._name)
        finally:
            with self._changed:
                self._writing.discard(key.chain)
                self._changed.notify_all()

    def _erase(self, erase: Callable[[], object]) -> None:
        with self._changed:
            self._erasures.append(erase)
        self._writer.submit(self._erase_next)

    def _erase_next(self) -> None:
        try:
            self._erasures[0]()
        except Exception:
            logger.exception("chunks of KV can't be deleted from %s", self._name)
        finally:
            with self._changed:
                self._erasures.popleft()


def _tell_nobody() -> None:
    """Nobody waits for news: they are polled."""
