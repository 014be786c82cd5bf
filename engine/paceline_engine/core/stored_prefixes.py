"""Stored KV comes back as cached blocks: loads for waiting requests, and chunks on their way out.

A load takes free blocks, has the store write KV of a waiting request's next tokens into them, publishes what came and
lets go. The request waits meanwhile and is then admitted through the prefix cache like any other, so sharing, caps,
salts and preemption stay as they are. Each request is looked up once, and whatever goes wrong ends with the blocks
given back and the prompt computed. A running request's next block goes before any load. Imports neither tensors nor
I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline_engine.core.block_pool import BlockPool, BlockPoolError
from paceline_engine.core.hot_prefixes import HotPrefixes
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.request import Request
from paceline_engine.core.stored_kv import ChunkLoad, LendsKV, StoredKV, Wanted
from paceline_engine.records import Struct

# Loads beside the first one hold at most this share of the pool together.
POOL_SHARE = 0.5
# A request waits no longer than this for lookup and load.
MAX_WAIT_SECONDS = 10.0
# Chunks handed to the store in one step, and those that wait for it; the oldest give way.
OFFERS_PER_STEP = 4
MAX_OFFERS = 256


class LoadState(Struct, frozen=True, kw_only=True):
    """A load between two steps; see `Load`."""

    request_id: str
    block_ids: tuple[int, ...]
    num_shared: int
    until: float
    tiers: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Load:
    """A load under way. block_ids: for the request's leading tokens, the first num_shared of them found in the cache.

    until: when it is given up. tiers: where each chunk that has come is from.
    """

    request: Request
    block_ids: list[int]
    num_shared: int
    until: float
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Offer:
    """A whole chunk of a tenant's, as long as its blocks still hold what `hashes` say."""

    parent: bytes | None
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    tenant: str


class StoredPrefixes:
    """Loads and offers of one pool and its prefix cache. num_loaded_tokens: that came, by the tier they came from.

    chunk_blocks: blocks of a chunk. num_dropped_offers: chunks that gave way to newer ones while the store had no room.
    lender: takes the prompts that other engines go on with, if there are such. hot: what is worth having at the next
    start, if somebody wants to know.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        block_size: int,
        store: StoredKV,
        chunk_blocks: int,
        max_wait_s: float = MAX_WAIT_SECONDS,
    ) -> None:
        self.store = store
        self.lender: LendsKV | None = None
        self.hot: HotPrefixes | None = None
        self.max_wait_s = max_wait_s
        self.num_loaded_tokens: dict[str, int] = {}
        self.num_dropped_offers = 0
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self.chunk_blocks = chunk_blocks
        self._loads: dict[str, Load] = {}
        self._lookups: dict[str, float] = {}
        self._unbegun: list[Load] = []
        # By the last hash, oldest first.
        self._offers: dict[bytes, _Offer] = {}
        self._is_store_full = False

    @property
    def loads(self) -> list[Load]:
        """Loads under way, oldest first."""
        return list(self._loads.values())

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    @property
    def num_offers(self) -> int:
        """Chunks that wait to be handed to the store."""
        return len(self._offers)

    def step(self, now: float) -> None:
        """Before a step is planned: publish what has come, give up what is late, hand some chunks to the store."""
        for arrived in self.store.poll():
            load = self._loads.get(arrived.request_id)
            if load is None:
                raise BlockPoolError(f"the store tells of a load for {arrived.request_id}, which has none")
            load.tiers = arrived.tiers
            if arrived.is_over:
                self._end(load)
        for load in self.loads:
            if now >= load.until:
                self._cancel(load)
        self._is_store_full = False
        for _ in range(OFFERS_PER_STEP):
            if not self._offer_next():
                break

    def num_awaited(self, request: Request, cached: Sequence[int], now: float, speed: float) -> int:
        """Tokens behind the cached ones that are being loaded, for this request or another; 0: don't wait.

        speed: of prefill, tokens a second; 0 if it isn't known.
        """
        own = self._loads.get(request.request_id)
        if own is not None:
            return (len(own.block_ids) - own.num_shared) * self._block_size
        if not self._loads or not self._may_wait(request, now, speed):
            return 0
        mine, begin = self._cache.identify(request), len(cached)
        for load in self._loads.values():
            theirs = load.request.block_hashes[: len(load.block_ids)]
            # Links of a chain: where one is equal, all before it are.
            if begin < min(len(mine), len(theirs)) and mine[begin] == theirs[begin]:
                num_equal = sum(ours == other for ours, other in zip(mine[begin:], theirs[begin:], strict=False))
                return num_equal * self._block_size
        return 0

    def begin(
        self, request: Request, cached: Sequence[int], now: float, speed: float, num_ahead: int, *, in_flight: bool
    ) -> int:
        """Look the request up, and load what is worth it: tokens to wait for. Blocks for all its tokens must be free.

        num_ahead: tokens that are computed before its own. in_flight: a step is, and it may still write to blocks that
        are free in the books, so the store begins when that step is booked (`start`).
        """
        if not self._may_wait(request, now, speed):
            return 0
        assert request.load_until is not None
        size, num_cached = self.chunk_blocks, len(cached)
        chain = self._cache.identify(request)[size - 1 :: size]
        first = num_cached // size
        if len(chain) <= first:  # The device has it all by now.
            self.drop(request)
            request.may_load = False
            return 0
        found = self._find(request, chain, first, now, speed, num_ahead)
        if found is None:
            return (len(chain) * size - num_cached) * self._block_size
        request.may_load = False
        num_chunks = min(found, len(chain), first + self._most_blocks() // size)
        # Computing the rest of a chunk is quicker than fetching all of it for a little.
        if num_chunks * size - num_cached < max(1, size // 2):
            if found > first:
                self.store.cancel(request.request_id)
            return 0
        self._begin(request, cached, chain[:num_chunks], now, in_flight)
        return (num_chunks * size - num_cached) * self._block_size

    def _find(
        self, request: Request, chain: Sequence[bytes], first: int, now: float, speed: float, num_ahead: int
    ) -> int | None:
        """As `StoredKV.find`."""
        assert request.load_until is not None
        num_tokens = request.num_tokens - first * self.chunk_blocks * self._block_size
        # What is left of the prompts that are being loaded is computed first, too.
        num_ahead += sum(load.request.num_tokens - len(load.block_ids) * self._block_size for load in self.loads)
        queue_s, compute_s = (num_ahead / speed, num_tokens / speed) if speed > 0.0 else (0.0, math.inf)
        # Nobody waits longer to hear what there is than computing it would take.
        until = self._lookups.get(request.request_id, min(request.load_until, now + queue_s + compute_s))
        found = self.store.find(
            Wanted(
                request_id=request.request_id,
                chain=chain,
                first=first,
                num_tokens=num_tokens,
                tokens_per_s=speed,
                queue_s=queue_s,
                deadline_s=request.load_until - now,
                may_wait=now < until,
                tenant=request.tenant,
            )
        )
        if found is None:
            self._lookups[request.request_id] = until
        else:
            self._lookups.pop(request.request_id, None)
        return found

    def _begin(
        self, request: Request, cached: Sequence[int], chain: Sequence[bytes], now: float, in_flight: bool
    ) -> None:
        # Held first, so that none of them is handed out as a new one.
        for block_id in cached:
            self._pool.share(block_id)
        block_ids = [*cached, *self._pool.allocate(len(chain) * self.chunk_blocks - len(cached))]
        assert request.load_until is not None
        load = Load(request, block_ids, len(cached), request.load_until)
        self._loads[request.request_id] = load
        self._unbegun.append(load)
        if not in_flight:
            self.start(now)

    def start(self, now: float) -> None:
        """No step is in flight but one that was planned after these loads took their blocks."""
        for load in self._unbegun:
            size, request = self.chunk_blocks, load.request
            first = load.num_shared // size
            num_blocks = len(load.block_ids)
            self.store.begin(
                ChunkLoad(
                    request_id=request.request_id,
                    chain=tuple(request.block_hashes[size - 1 : num_blocks : size]),
                    first=first,
                    block_ids=tuple(load.block_ids[first * size :]),
                    num_present=load.num_shared - first * size,
                    deadline_s=load.until - now,
                    tenant=request.tenant,
                )
            )
        self._unbegun.clear()

    def may_come_back(self, request: Request) -> bool:
        """Whether the request isn't through with the store."""
        return _may_load(request) or request.request_id in self._loads

    def attached(self, request: Request) -> None:
        """The request runs on cached blocks: those that the device had are in use again, so they are offered again."""
        if request.num_preemptions == 0:
            end = request.load_start // self._block_size if request.loaded_tokens else request.num_published_blocks
            self._offer(request, 0, min(end, request.num_published_blocks) // self.chunk_blocks)
        request.num_offered_chunks = max(request.num_offered_chunks, request.num_published_blocks // self.chunk_blocks)
        if request.num_preemptions == 0 and request.loaded_tokens:
            left = max(0, request.num_computed_tokens - request.load_start)
            used: dict[str, int] = {}
            for tier, num_tokens in request.loaded_tokens.items():
                if left > 0:
                    used[tier] = min(left, num_tokens)
                left -= num_tokens
            request.loaded_tokens = used

    def num_reserved(self, request: Request) -> int:
        """Blocks that the request lacks beyond those that are being loaded for it; 0 if none are."""
        load = self._loads.get(request.request_id)
        return -(-request.num_tokens // self._block_size) - len(load.block_ids) if load is not None else 0

    def give_way(self) -> bool:
        """End the newest load for somebody who needs blocks now; False if there is none. What has come stays."""
        if not self._loads:
            return False
        self._cancel(self.loads[-1])
        return True

    def remember(self, request: Request) -> None:
        """The request has used what it holds, and ends."""
        if self.hot is not None and request.may_publish:
            self.hot.use(request.block_hashes[: request.num_published_blocks], self.chunk_blocks)

    def drop(self, request: Request) -> None:
        """The request ended: so does its lookup or load."""
        load = self._loads.pop(request.request_id, None)
        until = self._lookups.pop(request.request_id, None)
        if load is not None or until is not None:
            self.store.cancel(request.request_id)
        if load is not None:
            self._release(load)

    def clear(self, *, stored: bool) -> None:
        """Publish nothing of what is under way or waits to be offered; with `stored`, nothing comes back at all."""
        for load in self.loads:
            self.drop(load.request)
        for request_id in self._lookups:
            self.store.cancel(request_id)
        self._lookups.clear()
        self._offers.clear()
        if stored:
            self.store.clear()
            if self.hot is not None:
                self.hot.clear()

    def distrust(self, request: Request) -> None:
        """What the request holds may be wrong: it isn't brought back for others."""
        size = self.chunk_blocks
        keys = request.block_hashes[size - 1 : len(request.block_ids) : size]
        self.store.forget(keys)
        if self.hot is not None:
            self.hot.forget(keys)

    def note(self, request: Request) -> None:
        """Have the store offered, soon, the chunks that the request has published since the last time."""
        end = request.num_published_blocks // self.chunk_blocks
        self._offer(request, request.num_offered_chunks, end)
        request.num_offered_chunks = max(request.num_offered_chunks, end)

    def lend(self, request: Request, now: float) -> None:
        """The request ends here and another engine goes on with it: lend the whole chunks that it has."""
        size = self.chunk_blocks
        num_blocks = request.num_published_blocks // size * size
        if self.lender is not None:
            chain = request.block_hashes[size - 1 : num_blocks : size]
            seconds = math.inf if request.e2e_deadline is None else max(0.0, request.e2e_deadline - now)
            self.lender.lend(request.request_id, chain, request.block_ids[:num_blocks], seconds, request.tenant)

    def offer_all(self) -> None:
        """Hand over every chunk that waits, as far as the store takes them: the engine ends."""
        while self._offer_next():
            pass
        self.num_dropped_offers += len(self._offers)
        self._offers.clear()

    def seconds_to_wait(self, now: float) -> float:
        """How long a step without anything else to do may be put off, unless the store has news; 0 if it may not."""
        if self._offers and not self._is_store_full:
            return 0.0
        limits = [*(load.until for load in self.loads), *self._lookups.values()]
        if limits:
            return max(0.0, min(limits) - now)
        return math.inf if self._offers else 0.0

    def held_block_ids(self) -> list[int]:
        """Blocks that loads hold, each as often as it is held."""
        return [block_id for load in self.loads for block_id in load.block_ids]

    def state(self) -> tuple[LoadState, ...]:
        """Loads as plain data, with no step in flight."""
        return tuple(
            LoadState(
                request_id=load.request.request_id,
                block_ids=tuple(load.block_ids),
                num_shared=load.num_shared,
                until=load.until,
                tiers=load.tiers,
            )
            for load in self.loads
        )

    def restore(self, states: Iterable[LoadState], requests: dict[str, Request]) -> None:
        """Go on from recorded loads, whose blocks the pool counts as held."""
        for state in states:
            request = requests[state.request_id]
            self._loads[state.request_id] = Load(
                request, list(state.block_ids), state.num_shared, state.until, state.tiers
            )

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise BlockPoolError unless loads belong to live requests that wait, and hold no block twice."""
        waiting = {request.request_id: request for request in requests if not request.block_ids}
        for request_id, load in self._loads.items():
            if waiting.get(request_id) is not load.request:
                raise BlockPoolError(f"a load for {request_id}, which doesn't wait")
            if len(set(load.block_ids)) != len(load.block_ids):
                raise BlockPoolError(f"the load for {request_id} holds a block twice")
        if any(request_id not in waiting for request_id in self._lookups):
            raise BlockPoolError("a lookup for a request that doesn't wait")

    def _may_wait(self, request: Request, now: float, speed: float) -> bool:
        """Whether the request may still be looked up, and its time isn't up."""
        if not _may_load(request):
            return False
        if request.load_until is None:
            request.load_until = min(now + self.max_wait_s, _latest(request, now, speed))
        if now >= request.load_until:
            request.may_load = False
            self.drop(request)
        return request.may_load

    def _most_blocks(self) -> int:
        """New blocks that one load more may take."""
        if not self._loads:
            return self._pool.num_free_blocks
        held = sum(len(load.block_ids) for load in self.loads)
        return max(0, min(self._pool.num_free_blocks, int(self._pool.num_blocks * POOL_SHARE) - held))

    def _cancel(self, load: Load) -> None:
        self.store.cancel(load.request.request_id)
        self._end(load)

    def _end(self, load: Load) -> None:
        """Publish the leading chunks that came, and let the blocks go."""
        request, size = load.request, self.chunk_blocks
        del self._loads[request.request_id]
        first = load.num_shared // size
        end = (first + len(load.tiers)) * size if load.tiers else load.num_shared
        if end > len(load.block_ids):
            raise BlockPoolError(f"{len(load.tiers)} chunks came for {request.request_id}, more than were asked for")
        self._cache.adopt(request, load.num_shared, load.block_ids[load.num_shared : end])
        request.load_start = load.num_shared * self._block_size
        for index, tier in enumerate(load.tiers):
            num_tokens = (size - (load.num_shared - first * size if index == 0 else 0)) * self._block_size
            request.loaded_tokens[tier] = request.loaded_tokens.get(tier, 0) + num_tokens
            self.num_loaded_tokens[tier] = self.num_loaded_tokens.get(tier, 0) + num_tokens
        self._release(load)

    def _release(self, load: Load) -> None:
        """Tail first, so that it is reused before the head."""
        if load in self._unbegun:
            self._unbegun.remove(load)
        self._pool.release(reversed(load.block_ids))

    def _offer(self, request: Request, begin: int, end: int) -> None:
        size, hashes = self.chunk_blocks, request.block_hashes
        for first in range(begin * size, end * size, size):
            own = tuple(hashes[first : first + size])
            parent = hashes[first - 1] if first else None
            offer = _Offer(parent, own, tuple(request.block_ids[first : first + size]), request.tenant)
            if own[-1] not in self._offers and len(self._offers) >= MAX_OFFERS:
                del self._offers[next(iter(self._offers))]
                self.num_dropped_offers += 1
            self._offers[own[-1]] = offer

    def _offer_next(self) -> bool:
        """Hand over the oldest chunk that waits; False if there is none or the store has no room."""
        if not self._offers:
            return False
        key, offer = next(iter(self._offers.items()))
        if self._cache.holds(offer.block_ids, offer.hashes):
            self._is_store_full = not self.store.offer(key, offer.parent, offer.block_ids, offer.tenant)
            if self._is_store_full:
                return False
        del self._offers[key]
        return True


def _may_load(request: Request) -> bool:
    return request.may_load and not request.wants_prompt_logprobs and request.num_preemptions == 0


def _latest(request: Request, now: float, speed: float) -> float:
    """When to stop waiting: while computing still meets the first token's deadline, or at it where that can't be."""
    if request.ttft_deadline is None:
        return math.inf
    latest = request.ttft_deadline - (request.num_tokens / speed if speed > 0.0 else 0.0)
    return latest if latest > now else request.ttft_deadline
