"""Block tables of requests, the blocks they share, and the way of a preempted sequence's KV to the store and back.

`SequenceStore` is where KV goes when a request loses its blocks. It moves the data at once, between two steps, so a
block may be handed to another request as soon as `save` returns. A store may forget anything at any time: `load` says
how many tokens came back, and the scheduler recomputes the rest. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from paceline_engine.core.block_pool import BlockPool, BlockPoolError
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.request import Request, RequestStatus
from paceline_engine.core.stored_prefixes import StoredPrefixes


class SequenceStore(Protocol):
    """Keeps KV of preempted sequences, keyed by their content (namespace, salt, tokens)."""

    def save(self, request: Request) -> int:
        """Copy KV of the first num_computed_tokens out of the request's blocks; how many tokens were kept."""
        ...

    def load(self, request: Request, num_tokens: int, start: int = 0) -> int:
        """Copy KV of up to `num_tokens` leading tokens into the request's blocks; how many came back.

        The first `start` of them are there already, in whole blocks that others may share: they must not be written.
        """
        ...

    def clear(self) -> None:
        """Forget everything: nothing of it may come back."""
        ...

    def drop(self, request: Request) -> None:
        """The request won't come back for its KV, if there is any."""
        ...


class KVManager:
    """Gives requests blocks, takes them back, and keeps count of what was offloaded and restored.

    `cache` is over the same pool; without one nothing is shared between requests. `stored`, over that cache, brings KV
    back into it from the key-value store.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        store: SequenceStore | None = None,
        cache: PrefixCache | None = None,
        stored: StoredPrefixes | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block size must be at least 1 token, not {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.cache = cache
        self.stored = stored
        self.num_offloaded_sequences = 0
        self.num_restored_sequences = 0
        self._store = store

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, rounded up."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks the request lacks to hold its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(request.block_ids))

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the block table to hold `num_tokens` tokens; the new ids, or None if too few blocks are free."""
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free_blocks:
            return None
        block_ids = self.pool.allocate(missing)
        request.block_ids.extend(block_ids)
        return block_ids

    def grow_if_free(self, request: Request, num_tokens: int) -> list[int]:
        """Like `grow`, for a caller that has seen to it that the blocks are free."""
        block_ids = self.grow(request, num_tokens)
        if block_ids is None:
            raise BlockPoolError(f"no blocks for request {request.request_id}, although they were counted")
        return block_ids

    @property
    def store(self) -> SequenceStore | None:
        """Where preempted requests' KV goes."""
        return self._store

    def find_cached(self, request: Request) -> list[int]:
        """Cached blocks with the request's leading tokens.

        None for a request whose prompt logprobs are still to be reported: they come with computing the prompt.
        """
        if self.cache is None or request.wants_prompt_logprobs:
            return []
        return self.cache.match(request)

    def may_come_back(self, request: Request) -> bool:
        """Whether the key-value store may still bring back some of the request, or just does."""
        return self.stored is not None and self.stored.may_come_back(request)

    def num_coming_tokens(self, request: Request, cached: list[int], prefilling: Iterable[Request]) -> int:
        """Tokens behind the cached ones that one of `prefilling` is about to compute and publish."""
        if self.cache is None or request.wants_prompt_logprobs:
            return 0
        mine = self.cache.identify(request)
        begin, end = len(cached), (request.num_tokens - 1) // self.block_size
        longest = begin
        for other in prefilling:
            theirs = other.block_hashes if other.may_publish else []
            # Links of a chain: where one is equal, all before it are.
            while longest < min(end, len(theirs)) and theirs[longest] == mine[longest]:
                longest += 1
        return (longest - begin) * self.block_size

    def num_blocks_to_admit(self, request: Request, cached: list[int]) -> int:
        """Free blocks that a waiting request takes when it holds all its tokens, `cached` ones that are free included.

        A cached block that somebody holds costs nothing.
        """
        held = sum(1 for block_id in cached if self.pool.ref_count(block_id) > 0)
        return self.num_blocks_for(request.num_tokens) - held

    def attach(self, request: Request, cached: list[int]) -> None:
        """Share cached blocks with a request that has none; their tokens count as computed."""
        for block_id in cached:
            self.pool.share(block_id)
        request.block_ids.extend(cached)
        request.num_computed_tokens = len(cached) * self.block_size
        request.num_published_blocks = len(cached)
        if self.stored is not None:
            self.stored.attached(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            if self.cache is not None:
                self.cache.count(request, request.num_computed_tokens)

    def publish(self, request: Request) -> None:
        """Let others find the blocks that the request has filled."""
        if self.cache is not None and request.num_computed_tokens // self.block_size > request.num_published_blocks:
            self.cache.publish(request)
            if self.stored is not None:
                self.stored.note(request)

    def distrust(self, request: Request) -> None:
        """What the request holds may be the reason why it failed: others compute their own."""
        if self.cache is not None:
            self.cache.withdraw(request.block_ids)
        if self.stored is not None:
            self.stored.distrust(request)

    def release(self, request: Request) -> None:
        """Give all blocks back, last first, so that a sequence's tail is reused before its head."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()
        request.num_computed_tokens = 0
        request.num_published_blocks = 0
        request.may_publish = True

    def preempt(self, request: Request) -> None:
        """Take the request's blocks, after its KV went to the store if there is one."""
        if self._store is not None and request.num_computed_tokens > 0 and request.may_publish:
            request.num_offloaded_tokens = self._store.save(request)
            self.num_offloaded_sequences += request.num_offloaded_tokens > 0
        self.release(request)

    def restore(self, request: Request) -> None:
        """Bring offloaded KV into the request's blocks and set num_computed_tokens to what there is then.

        At least one token stays to be computed, since its logits yield the next token.
        """
        wanted, have = min(request.num_offloaded_tokens, request.num_tokens - 1), request.num_computed_tokens
        request.num_offloaded_tokens = 0
        if self._store is None or wanted == 0:
            return
        if wanted <= have:
            self._store.drop(request)
            return
        restored = self._store.load(request, wanted, have)
        if not 0 <= restored <= wanted:
            raise BlockPoolError(f"the store returned {restored} tokens, {wanted} were asked for")
        request.num_computed_tokens = max(have, restored)
        self.num_restored_sequences += restored > have

    def finish(self, request: Request) -> None:
        """Give back everything the request holds, here and in the store."""
        if self.stored is not None:
            self.stored.remember(request)
        self.release(request)
        if self.stored is not None:
            self.stored.drop(request)
        if self._store is not None:
            self._store.drop(request)
        request.num_offloaded_tokens = 0

    def forget_everything(self, running: Iterable[Request], waiting: Iterable[Request], *, stored: bool = True) -> None:
        """No KV computed until now can be found by, or come back to, a request that doesn't hold it now.

        Running requests go on with what they hold and publish no more of it. Without `stored`, what the key-value store
        has by now may still come back.
        """
        for request in running:
            request.may_publish = False
        for request in waiting:
            request.num_offloaded_tokens = 0
        if self._store is not None:
            self._store.clear()
        if self.stored is not None:
            self.stored.clear(stored=stored)
        if self.cache is not None:
            self.cache.clear()

    def check_integrity(self, requests: list[Request]) -> None:
        """Raise BlockPoolError unless pool, cache and the requests' block tables agree."""
        self.pool.check_integrity()
        if self.cache is not None:
            self.cache.check_integrity()
        held = Counter(block_id for request in requests for block_id in request.block_ids)
        if self.stored is not None:
            self.stored.check_integrity(requests)
            held.update(self.stored.held_block_ids())
        for block_id in range(self.pool.num_blocks):
            if held[block_id] != self.pool.ref_count(block_id):
                holders = f"{held[block_id]} requests and loads hold block {block_id}"
                raise BlockPoolError(f"{holders}, the pool counts {self.pool.ref_count(block_id)}")
            if held[block_id] > 1 and not self.pool.is_cached(block_id) and self.cache is None:
                raise BlockPoolError(f"two requests hold block {block_id}")
        for request in requests:
            if request.status is not RequestStatus.RUNNING and request.block_ids:
                raise BlockPoolError(f"{request.status} request {request.request_id} holds blocks")
            if len(set(request.block_ids)) != len(request.block_ids):
                raise BlockPoolError(f"request {request.request_id} holds a block twice")
            if request.num_computed_tokens > len(request.block_ids) * self.block_size:
                raise BlockPoolError(f"request {request.request_id} has more computed tokens than its blocks hold")
