"""The prefill side of a hand-off: a prompt's chunks are put where another engine finds them, and lent for a while.

`lend` takes what it needs and returns; threads do the rest, so that the steps never wait. Whatever goes wrong, fewer
chunks are lent, or none. Imports no torch.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from paceline_engine.core.handoffs import HandoffBook, Outcome
from paceline_engine.messages import Handoff
from paceline_kvstore.codec import Buffer, as_bytes
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.shared import SharedLevel
from paceline_kvstore.tiered.writes import Chunk

NUM_THREADS = 2
# Hand-offs whose chunks are on their way, and the memory that those may take.
MAX_LENDING = 64
MAX_BYTES = 1 << 30
MAX_LEASES = 4096
# A prompt's chunks are there after this long, or aren't lent.
MAX_SECONDS = 10.0

logger = logging.getLogger(__name__)


class ReadsChunks(Protocol):
    """A device whose KV can be copied out of its blocks; see `kv_chunks.ChunkCopier`."""

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a chunk."""
        ...

    def read_later(self, block_ids: Sequence[int], num_tokens: int) -> Callable[[], Buffer]:
        """A chunk's bytes, when they are asked for; the blocks may change meanwhile."""
        ...


def holder_of(epoch: str, transfer_id: str) -> str:
    """The name under which both engines know a lease. Of another epoch, it is another lease."""
    return f"handoff/{epoch}/{transfer_id}"


@dataclass(slots=True, eq=False)
class _Lending:
    """Chunks on their way, until `poll` has told of them. contents: of each, None where the tier should have it.

    put: what was written for it, or may have been.
    """

    request_id: str
    tenant: str
    epoch: str
    keys: list[ChunkKey]
    contents: list[Callable[[], Buffer] | None]
    num_bytes: int
    until: float
    is_aborted: bool = False
    is_done: bool = False
    handoff: Handoff | None = None
    put: list[ChunkKey] = field(default_factory=list[ChunkKey])
    transfer_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def holder(self) -> str:
        return holder_of(self.epoch, self.transfer_id)


class KVLender:
    """`close` it: it has threads. lease_s: seconds that chunks are lent for. wall_clock: gives Unix seconds."""

    def __init__(
        self,
        shared: SharedLevel,
        copier: ReadsChunks,
        namespace: bytes,
        chunk_tokens: int,
        lease_s: float,
        book: HandoffBook,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._shared = shared
        self._copier = copier
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._lease_s = lease_s
        self._book = book
        self._tell: Callable[[], object] = lambda: None
        self._wall_clock = wall_clock
        self._life, self._number = secrets.token_hex(8), 0
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-lend")
        self._lock = threading.Lock()
        self._lending: dict[str, _Lending] = {}
        self._num_bytes = 0
        # Holders, in the order in which their leases end.
        self._leases: dict[str, float] = {}

    @property
    def epoch(self) -> str:
        """Of this process's KV, as it is now."""
        return f"{self._life}.{self._number}"

    @property
    def num_leases(self) -> int:
        """Leases that haven't expired. That the other engine has ended one isn't known here."""
        with self._lock:
            self._expire()
            return len(self._leases)

    def on_news(self, tell: Callable[[], object]) -> None:
        """Have `tell` called, in any thread, when `poll` has something."""
        self._tell = tell

    def is_lending(self, request_id: str) -> bool:
        """Whether `poll` will tell of this request."""
        with self._lock:
            return request_id in self._lending

    def lend(
        self, request_id: str, chain: Sequence[bytes], block_ids: Sequence[int], seconds: float, tenant: str = ""
    ) -> bool:
        """Lend the chunks of these blocks, which may change as soon as this returns; False if nothing will be lent.

        chain: the hash at the end of each chunk. seconds: what it may take, at most MAX_SECONDS.
        tenant: whose KV it is.
        """
        keys = [ChunkKey(self._namespace, link, self._chunk_tokens) for link in chain]
        if not keys:
            return self._refuse(request_id, "short")
        found = [self._shared.find_in_memory(key) for key in keys]
        is_absent = [
            payload is None and not self._shared.is_known(key) for key, payload in zip(keys, found, strict=True)
        ]
        num_bytes = sum(is_absent) * self._copier.num_bytes(self._chunk_tokens)
        if self._is_busy(num_bytes):
            return self._refuse(request_id, "busy")
        size = len(block_ids) // len(keys)
        contents: list[Callable[[], Buffer] | None] = []
        for index, payload in enumerate(found):
            if is_absent[index]:
                blocks = block_ids[index * size : (index + 1) * size]
                contents.append(self._copier.read_later(blocks, self._chunk_tokens))
            else:
                contents.append(None if payload is None else partial(as_bytes, payload))
        until = time.monotonic() + min(seconds, MAX_SECONDS)
        lending = _Lending(request_id, tenant, self.epoch, keys, contents, num_bytes, until)
        with self._lock:
            self._lending[request_id] = lending
            self._num_bytes += num_bytes
        self._pool.submit(self._run, lending)
        return True

    def poll(self) -> list[tuple[str, Handoff | None]]:
        """Requests whose hand-off is settled since the last call, with what is lent."""
        with self._lock:
            done = [lending for lending in self._lending.values() if lending.is_done]
            for lending in done:
                del self._lending[lending.request_id]
        return [(lending.request_id, lending.handoff) for lending in done]

    def abort(self, request_id: str) -> bool:
        """Nobody wants the hand-off any more; False if there is none under way. `poll` won't tell of it."""
        with self._lock:
            lending = self._lending.pop(request_id, None)
            if lending is None:
                return False
            lending.is_aborted = True
            is_lent = self._leases.pop(lending.holder, None) is not None
        if is_lent:
            self._pool.submit(self._release, lending.holder)
        return True

    def new_epoch(self) -> None:
        """What was lent until now must not be used any more."""
        with self._lock:
            self._number += 1
            holders = list(self._leases)
            self._leases.clear()
        for holder in holders:
            self._pool.submit(self._release, holder)

    def close(self) -> None:
        """End. What is lent stays so until it expires; the process's end is no reason to compute it anew."""
        with self._lock:
            for lending in self._lending.values():
                lending.is_aborted = True
        self._pool.shutdown(cancel_futures=True)

    def _is_busy(self, num_bytes: int) -> bool:
        with self._lock:
            self._expire()
            is_full = len(self._lending) >= MAX_LENDING or len(self._leases) >= MAX_LEASES
            return is_full or self._num_bytes + num_bytes > MAX_BYTES

    def _run(self, lending: _Lending) -> None:
        """In a thread."""
        num_held = 0
        try:
            is_there = self._put(lending)
            if is_there and not lending.is_aborted:
                num_held = self._shared.hold(lending.holder, lending.keys, self._lease_s)
        except Exception:
            logger.exception("chunks can't be lent; the other engine computes them")
        outcome = self._settle(lending, num_held)
        self._book.note(lending.request_id, "prefill", outcome, self._wall_clock(), num_held)
        if num_held and outcome != "lent":
            self._release(lending.holder)
        if outcome == "stale":
            self._take_back(lending)
        self._tell()

    def _settle(self, lending: _Lending, num_held: int) -> Outcome:
        with self._lock:
            self._num_bytes -= lending.num_bytes
            lending.contents.clear()
            lending.is_done = True
            if lending.is_aborted:
                return "aborted"
            if lending.epoch != self.epoch:
                return "stale"
            if not num_held:
                return "late"
            self._leases[lending.holder] = time.monotonic() + self._lease_s
            lending.handoff = Handoff(
                transfer_id=lending.transfer_id,
                epoch=lending.epoch,
                namespace=self._namespace.hex(),
                num_tokens=num_held * self._chunk_tokens,
                num_chunks=num_held,
                expires_at=self._wall_clock() + self._lease_s,
            )
            return "lent"

    def _put(self, lending: _Lending) -> bool:
        """Put what the tier lacks there, from the first chunk on, until the time is up; whether others see it."""
        there = self._shared.find(lending.keys, lending.until)
        for index in range(there, len(lending.keys)):
            content = lending.contents[index]
            if content is None or lending.is_aborted or time.monotonic() >= lending.until:
                break
            if lending.epoch != self.epoch:
                break
            parent = lending.keys[index - 1] if index else None
            lending.put.append(lending.keys[index])
            if not self._shared.put(
                Chunk(lending.keys[index], as_bytes(content()).toreadonly(), parent, lending.tenant)
            ):
                break
        # What was there may wait in a queue of this process, where no other engine finds it.
        return self._shared.settle(lending.until)

    def _refuse(self, request_id: str, outcome: Outcome) -> bool:
        self._book.note(request_id, "prefill", outcome, self._wall_clock())
        return False

    def _take_back(self, lending: _Lending) -> None:
        """A reset empties the tier, and may have done so before the last of these chunks came there."""
        try:
            for key in lending.put:
                self._shared.delete(key)
        except Exception:
            logger.exception("chunks of before a reset can't be deleted")

    def _release(self, holder: str) -> None:
        try:
            self._shared.release(holder)
        except Exception:
            logger.exception("a lease can't be ended; it expires")

    def _expire(self) -> None:
        now = time.monotonic()
        while self._leases and (holder := next(iter(self._leases))) and self._leases[holder] <= now:
            del self._leases[holder]
