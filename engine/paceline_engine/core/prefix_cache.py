"""Which blocks hold KV that a later request can share, and the events that tell others about it.

A full block of accepted tokens is published under its chain hash (`paceline_api.identity`: tokens, tenant salt,
adapter). A block keeps its hash when it is freed and stays findable until it is handed out anew, so the pool's list of
free cached blocks is the LRU. A request frees its tail before its head, and whoever holds a block holds all before it,
so leaves are evicted before trunks. Equal blocks aren't merged: block tables only grow, and a hash may name several
blocks. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from paceline_api.identity import block_hash
from paceline_engine.core.block_pool import BlockPool, BlockPoolError
from paceline_engine.core.outputs import UNKNOWN
from paceline_engine.core.radix_index import RadixIndex
from paceline_engine.core.request import Request
from paceline_engine.messages import KVEvent

PrefixIndex = Literal["hash", "radix"]
# Events kept for one reader that takes them after each step. A step makes at most a few for each block it touches; more
# than this means that nobody reads.
MAX_EVENTS = 4096


class PrefixCache:
    """Finds and publishes blocks of one pool. `index`: what is looked up, hashes or tokens; both find the same.

    num_query_tokens, num_hit_tokens: prompt tokens of admitted requests, and those of them that were found.
    num_partial_tokens: with the radix index, tokens that agreed beyond the last whole block that was found.
    """

    def __init__(self, pool: BlockPool, block_size: int, index: PrefixIndex = "hash") -> None:
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_partial_tokens = 0
        self._pool = pool
        self._block_size = block_size
        self._tree = RadixIndex(block_size) if index == "radix" else None
        self._hash_of: dict[int, bytes] = {}
        self._blocks_of: dict[bytes, list[int]] = {}
        self._events: list[KVEvent] = []
        self._num_events_taken = 0
        pool.on_reuse(self._forget)

    def match(self, request: Request) -> list[int]:
        """Ids of cached blocks that hold the request's leading tokens, first first.

        At most what leaves one token to compute, since its logits yield the next one.
        """
        max_blocks = (request.num_tokens - 1) // self._block_size
        if self._tree is not None:
            return self._tree.match(_root(request), request.token_ids, max_blocks).block_ids
        block_ids: list[int] = []
        for key in self._hashes(request, max_blocks)[:max_blocks]:
            copies = self._blocks_of.get(key)
            if copies is None:
                break
            block_ids.append(copies[0])
        return block_ids

    def identify(self, request: Request) -> list[bytes]:
        """Hashes of all full blocks of the request's known tokens."""
        return self._hashes(request, request.num_tokens // self._block_size)

    def count(self, request: Request, num_hit_tokens: int) -> None:
        """Count the look-up of a request that is admitted for the first time."""
        self.num_query_tokens += request.num_prompt_tokens
        self.num_hit_tokens += num_hit_tokens
        if self._tree is not None:
            agreed = self._tree.match(_root(request), request.token_ids, 0).num_tokens
            self.num_partial_tokens += max(0, min(agreed, request.num_tokens - 1) - num_hit_tokens)

    def publish(self, request: Request) -> None:
        """Let others find the request's full computed blocks that they can't find yet."""
        begin, end = request.num_published_blocks, request.num_computed_tokens // self._block_size
        if end <= begin or not request.may_publish:
            return
        request.num_published_blocks = end
        self._publish(request, begin, request.block_ids[begin:end])

    def adopt(self, request: Request, begin: int, block_ids: Sequence[int]) -> None:
        """Let others find held blocks with KV of the request's blocks from `begin` on, where nobody has any yet."""
        hashes = self._hashes(request, begin + len(block_ids))
        for index, block_id in enumerate(block_ids, begin):
            if hashes[index] not in self._blocks_of:
                self._publish(request, index, [block_id])

    def holds(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> bool:
        """Whether the blocks can still be found under these hashes."""
        return all(self._hash_of.get(block_id) == key for block_id, key in zip(block_ids, hashes, strict=True))

    def _publish(self, request: Request, begin: int, block_ids: Sequence[int]) -> None:
        end = begin + len(block_ids)
        hashes = self._hashes(request, end)
        first_new = begin
        for index, block_id in enumerate(block_ids, begin):
            key = hashes[index]
            self._hash_of[block_id] = key
            copies = self._blocks_of.setdefault(key, [])
            copies.append(block_id)
            self._pool.mark_cached(block_id)
            if self._tree is not None:
                self._tree.add(_root(request), request.token_ids[: (index + 1) * self._block_size], block_id)
            if len(copies) > 1:
                self._stored(request, first_new, index)
                first_new = index + 1
        self._stored(request, first_new, end)

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The request's chain, extended to `num_blocks`; each link is made once, and kept over preemption."""
        hashes, size = request.block_hashes, self._block_size
        for index in range(len(hashes), num_blocks):
            token_ids = request.token_ids[index * size : (index + 1) * size]
            parent = hashes[-1] if hashes else None
            hashes.append(block_hash(parent, token_ids, request.salt, request.adapter_digest))
        return hashes

    def _stored(self, request: Request, begin: int, end: int) -> None:
        if begin == end:
            return
        size, hashes = self._block_size, request.block_hashes
        token_ids = request.token_ids[begin * size : end * size]
        self._note(
            KVEvent(
                sequence=0,
                kind="stored",
                block_hashes=tuple(hashes[begin:end]),
                parent_hash=hashes[begin - 1] if begin else None,
                token_ids=tuple(token_ids) if UNKNOWN not in token_ids else (),
            )
        )

    def _forget(self, block_id: int) -> None:
        """The block can't be found any more, as when the pool hands it out anew."""
        key = self._hash_of.pop(block_id)
        copies = self._blocks_of[key]
        copies.remove(block_id)
        if self._tree is not None:
            self._tree.remove(block_id)
        if not copies:
            del self._blocks_of[key]
            self._note(KVEvent(sequence=0, kind="removed", block_hashes=(key,)))

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Nobody finds these held blocks any more."""
        for block_id in block_ids:
            if block_id in self._hash_of:
                self._pool.unmark_cached(block_id)
                self._forget(block_id)

    def clear(self) -> None:
        """Nothing can be found any more; blocks that are held stay with their holders."""
        self._pool.unmark_all()
        self._hash_of.clear()
        self._blocks_of.clear()
        if self._tree is not None:
            self._tree.clear()
        self._events = [KVEvent(sequence=0, kind="cleared")]

    def _note(self, event: KVEvent) -> None:
        """Sequence numbers are given when events are taken, so dropping unread ones leaves no gap.

        A reader that hears "cleared" instead finds less than there is, never something that is gone.
        """
        if len(self._events) >= MAX_EVENTS:
            self._events = [KVEvent(sequence=0, kind="cleared")]
        elif event.kind == "removed" and self._events and self._events[-1].kind == "removed":
            hashes = self._events[-1].block_hashes + event.block_hashes
            self._events[-1] = KVEvent(sequence=0, kind="removed", block_hashes=hashes)
        else:
            self._events.append(event)

    def take_events(self) -> tuple[KVEvent, ...]:
        """Events since the last call, numbered without a gap."""
        if not self._events:
            return ()
        first = self._num_events_taken
        events = tuple(
            KVEvent(
                sequence=first + index,
                kind=event.kind,
                block_hashes=event.block_hashes,
                parent_hash=event.parent_hash,
                token_ids=event.token_ids,
            )
            for index, event in enumerate(self._events)
        )
        self._num_events_taken += len(events)
        self._events = []
        return events

    def entries(self) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
        """Block ids by hash, the copy that a hit takes first."""
        return tuple((key, tuple(copies)) for key, copies in self._blocks_of.items())

    def restore(self, entries: Iterable[tuple[bytes, Sequence[int]]]) -> None:
        """Know these blocks, which the pool has marked; for an empty cache with the hash index."""
        for key, copies in entries:
            self._blocks_of[key] = list(copies)
            self._hash_of.update(dict.fromkeys(copies, key))

    def check_integrity(self) -> None:
        """Raise BlockPoolError unless the books agree with one another and with the pool's marks."""
        listed = sorted(block_id for copies in self._blocks_of.values() for block_id in copies)
        if listed != sorted(self._hash_of):
            raise BlockPoolError(f"{len(listed)} blocks listed by hash, {len(self._hash_of)} hashes by block")
        marked = [block_id for block_id in range(self._pool.num_blocks) if self._pool.is_cached(block_id)]
        if marked != listed:
            raise BlockPoolError(f"{len(marked)} blocks marked as cached in the pool, {len(listed)} known here")
        if any(self._hash_of[block_id] != key for key, copies in self._blocks_of.items() for block_id in copies):
            raise BlockPoolError("a block is listed under a hash that isn't its own")
        if self._tree is not None:
            self._tree.check_integrity()
            if len(self._tree) != len(self._hash_of):
                raise BlockPoolError(f"the tree has {len(self._tree)} blocks, the hashes {len(self._hash_of)}")


def _root(request: Request) -> tuple[str, str]:
    return (request.salt, request.adapter_digest)
