"""Stored prefixes over the tiered key-value store: what to load, on its way into blocks, and copies on their way out.

Implements `core.stored_kv.StoredKV`. Lookups, reads and writes happen in the store's threads; two of this module's own
place chunks into blocks, and one fetches copies from the device. Whatever is wrong with a tier is a miss, and its
chunks are computed. Imports no torch.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from paceline_engine.core.stored_kv import Arrived, ChunkLoad, Wanted
from paceline_engine.prefix_load import PrefixLoad
from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy.reuse import Decision, Prefill
from paceline_kvstore.tiered.level import Level
from paceline_kvstore.tiered.lookup import Lookup, Plan
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers.base import Filling

NUM_PLACERS = 2
# Chunks on their way from the device to the store; a chunk offered beyond that must be offered again.
MAX_COPIES = 16
MAX_DECISIONS = 1024
# Before the first prefill nothing is known of its speed. This one has everything loaded that there is.
UNKNOWN_TOKENS_PER_S = 1.0
PLACEMENT_KEPT = 0.8

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

    def allocate(self, num_bytes: int) -> Buffer:
        """Memory from which chunks are copied quickest."""
        ...

    def read_later(
        self, block_ids: Sequence[int], num_tokens: int, target: memoryview | None = None
    ) -> Callable[[], Buffer]:
        """A chunk's bytes, in `target` if there is one, when they are asked for; the blocks may change meanwhile."""
        ...

    def write(self, block_ids: Sequence[int], num_tokens: int, payload: memoryview, skipped: int = 0) -> None:
        """Copy a chunk into blocks, but its first `skipped` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """A lookup whose answer isn't complete yet, of the chunks from `first` on."""

    lookup: Lookup
    first: int


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What there is, or is to be loaded of it, and why."""

    plan: Plan
    decision: Decision
    prefill: Prefill

    def __str__(self) -> str:
        decision = self.decision
        where = ", ".join(f"{tokens} in {name}" for name, tokens in self.plan.tokens_by_level().items())
        there = f"of {decision.num_tokens} tokens {where}"
        if not decision.num_chunks:
            why = f"to compute them takes {decision.first_token_s:.3g} s, to load them {decision.other_s:.3g} s"
            late = f"to compute them takes {decision.first_token_s:.3g} s, and none could be there in time"
            return f"{there}; none are loaded: {late if math.isinf(decision.other_s) else why}"
        if self.prefill.tokens_per_s == UNKNOWN_TOKENS_PER_S:
            return f"{there}; {decision.num_tokens_loaded} are loaded: the speed of computing isn't known yet"
        times = f"the first token comes in {decision.first_token_s:.3g} s, else in {decision.other_s:.3g} s"
        return f"{there}; {decision.num_tokens_loaded} are loaded: {times}"


class PrefixStore:
    """`close` it: it has threads, and closes the store.

    num_refused: offers that found no room.
    """

    def __init__(self, store: TieredStore, copier: CopiesChunks, namespace: bytes, chunk_tokens: int) -> None:
        self.store = store
        self.num_refused = 0
        self._copier = copier
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = copier.num_bytes(chunk_tokens)
        self._placers = ThreadPoolExecutor(NUM_PLACERS, thread_name_prefix="kv-place")
        # One thread, so that what is erased and what is written afterwards stay in order.
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._changed = threading.Condition()
        self._asked: dict[str, _Asked] = {}
        self._chosen: dict[str, _Chosen] = {}
        self._loads: dict[str, PrefixLoad] = {}
        # The latest, to be explained.
        self._decided: dict[str, _Chosen] = {}
        self._copying: set[bytes] = set()
        self._erasures: deque[Callable[[], object]] = deque()
        self._placement = math.inf
        self._patient_until = 0.0
        self._tell: Callable[[], None] = _tell_nobody

    @property
    def copier(self) -> CopiesChunks:
        """What copies chunks from and to the device."""
        return self._copier

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self._chunk_tokens

    @property
    def namespace(self) -> bytes:
        """Digest of what its chunks are the state of."""
        return self._namespace

    def on_news(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, in any thread, when `find` or `poll` may have another answer."""
        self._tell = tell

    def find(self, wanted: Wanted) -> int | None:
        """How many leading chunks make the first token earliest; None while a tier that must be asked hasn't answered.

        Nothing while an erasure isn't done.
        """
        with self._changed:
            if self._erasures:
                self._asked.pop(wanted.request_id, None)
                return wanted.first
        asked = self._asked.get(wanted.request_id)
        if asked is None:
            keys = [self._key(link) for link in wanted.chain[wanted.first :]]
            bytes_per_token = self._chunk_bytes // self._chunk_tokens
            asked = _Asked(self.store.lookup(keys, bytes_per_token, on_news=self._tell), wanted.first)
        if wanted.may_wait and asked.lookup.is_pending:
            self._asked[wanted.request_id] = asked
            return None
        self._asked.pop(wanted.request_id, None)
        return wanted.first + self._decide(wanted, asked)

    def explain(self) -> dict[str, str]:
        """What was found for the latest requests, what is loaded of it and why, by request id."""
        return {request_id: str(chosen) for request_id, chosen in self._decided.items()}

    def begin(self, load: ChunkLoad) -> None:
        """Have the chunks fetched, and placed in order as they come."""
        chosen = self._chosen.pop(load.request_id)
        made = PrefixLoad(load, chosen.decision, chosen.prefill, self._copier, self._chunk_tokens)
        self._loads[load.request_id] = made
        made.fetch = self.store.fetch(
            chosen.plan.first(len(load.chain) - load.first),
            load.deadline_s,
            parent=self._key(load.chain[load.first - 1]) if load.first else None,
            tenant=load.tenant,
            on_news=lambda: self._place(made),
        )
        self._place(made)

    def poll(self) -> list[Arrived]:
        """Loads that have come on since the last call."""
        news: list[Arrived] = []
        for request_id, load in list(self._loads.items()):
            arrived = load.poll()
            if arrived is not None:
                news.append(arrived)
                if arrived.is_over:
                    del self._loads[request_id]
                    self._record(load)
        return news

    def cancel(self, request_id: str) -> None:
        """Wait until no thread is at the load's blocks; none will be."""
        self._asked.pop(request_id, None)
        self._chosen.pop(request_id, None)
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.cancel()
            if load.is_late:
                self._record(load)

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        """Have the chunk copied to the tiers that lack it and want it; False if there is no room now."""
        chunk = self._key(key)
        with self._changed:
            if key in self._copying:
                return True
            num_copies = len(self._copying)
        if self._patient_until:
            num_copies = self._wait_for_room()
        size = self._chunk_bytes
        takers = self.store.takers(chunk, size, num_copies * size) if num_copies < MAX_COPIES else None
        if takers is None:
            self.num_refused += 1
            return False
        if takers:
            before = None if parent is None else self._key(parent)
            filling = self.store.fill(takers, chunk, size, before, tenant)
            target = None if filling is None else filling.buffer
            content = self._copier.read_later(block_ids, self._chunk_tokens, target)
            with self._changed:
                self._copying.add(key)
            self._copies.submit(self._copy, takers, chunk, content, before, tenant, filling)
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete chunks, after what is being written; nothing is found until that is done."""
        self._erase(lambda: [self.store.delete(self._key(key)) for key in keys])

    def clear(self) -> None:
        """Delete all chunks of this namespace, after what is being written; nothing is found until that is done."""
        self._erase(lambda: self.store.clear(namespace=self._namespace))

    def drain(self, seconds: float) -> None:
        """The engine ends: `offer` waits for room now, and `close` for writes, together so long."""
        self._patient_until = time.monotonic() + seconds

    def flush(self, seconds: float) -> bool:
        """Wait until all that was offered is durable, and take no more; False if it isn't in that time."""
        until = time.monotonic() + seconds
        with self._changed:
            is_copied = self._changed.wait_for(lambda: not self._copying, seconds)
        return self.store.drain(max(0.0, until - time.monotonic())) and is_copied

    def close(self) -> bool:
        """End, after `drain` when all that was offered is durable or its time is up; False if some of it is not."""
        for request_id in list(self._loads):
            self.cancel(request_id)
        self._placers.shutdown(cancel_futures=True)
        patience = max(0.0, self._patient_until - time.monotonic())
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._copying, patience)
        self._copies.shutdown(cancel_futures=True)
        while self._erasures:  # A restart must not bring it back.
            self._erase_next()
        patience = self._patient_until - time.monotonic()
        is_done &= self.store.drain(patience) if patience > 0.0 else not len(self.store.writes)
        if not is_done:
            logger.warning("not all KV that was offered is in the store: the time for it was up")
        self.store.close()
        return is_done

    def _wait_for_room(self) -> int:
        """Until the store can take a chunk, or patience ends; how many copies are under way then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._copying, max(0.0, self._patient_until - time.monotonic()))
            num_copies = len(self._copying)
        self.store.levels[0].writes.wait_room(self._chunk_bytes, self._patient_until)
        return num_copies

    def _key(self, link: bytes) -> ChunkKey:
        return ChunkKey(self._namespace, link, self._chunk_tokens)

    def _decide(self, wanted: Wanted, asked: _Asked) -> int:
        """How many of the chunks to load that the lookup found."""
        # What the device got meanwhile isn't needed any more; what it lost meanwhile wasn't looked up.
        chunks = asked.lookup.plan.chunks[wanted.first - asked.first :] if wanted.first >= asked.first else ()
        if not chunks:
            return 0
        speed = wanted.tokens_per_s or UNKNOWN_TOKENS_PER_S
        prefill = Prefill(speed, wanted.queue_s, self._placement)
        plan = Plan(chunks)
        decision = self.store.decide(plan, prefill, wanted.num_tokens, deadline_s=wanted.deadline_s)
        self._decided[wanted.request_id] = _Chosen(plan, decision, prefill)
        if len(self._decided) > MAX_DECISIONS:
            del self._decided[next(iter(self._decided))]
        if decision.num_chunks:
            self._chosen[wanted.request_id] = _Chosen(plan.first(decision.num_chunks), decision, prefill)
        else:
            self.store.record(decision, 0.0, 0, prefill)
        return decision.num_chunks

    def _record(self, load: PrefixLoad) -> None:
        """What became of the decision to load; nothing is known of it before the first prefill."""
        self._placement = _faded(self._placement, load.placement)
        if load.prefill.tokens_per_s != UNKNOWN_TOKENS_PER_S:
            num_tokens = load.num_placed * self._chunk_tokens
            self.store.record(load.decision, load.seconds, num_tokens, load.prefill)

    def _place(self, load: PrefixLoad) -> None:
        """Have a thread place what has come, unless one is at it already."""
        if load.fetch is not None and load.ask():
            self._placers.submit(self._place_next, load)

    def _place_next(self, load: PrefixLoad) -> None:
        if load.place():
            self._tell()

    def _copy(
        self,
        takers: Sequence[Level],
        key: ChunkKey,
        content: Callable[[], Buffer],
        parent: ChunkKey | None,
        tenant: str,
        filling: Filling | None,
    ) -> None:
        try:
            self.store.take(takers, key, content(), parent=parent, tenant=tenant, filling=filling)
        except Exception:
            logger.exception("a chunk of KV can't be copied from the device")
        finally:
            with self._changed:
                self._copying.discard(key.chain)
                self._changed.notify_all()

    def _erase(self, erase: Callable[[], object]) -> None:
        with self._changed:
            self._erasures.append(erase)
        self._copies.submit(self._erase_next)

    def _erase_next(self) -> None:
        try:
            self._erasures[0]()
        except Exception:
            logger.exception("chunks of KV can't be deleted from the store")
        finally:
            with self._changed:
                self._erasures.popleft()


def _faded(known: float, measured: float | None) -> float:
    """A running mean of speeds, infinite before the first."""
    if measured is None:
        return known
    return measured if math.isinf(known) else PLACEMENT_KEPT * known + (1.0 - PLACEMENT_KEPT) * measured


def _tell_nobody() -> None:
    """Nobody waits for news: they are polled."""
