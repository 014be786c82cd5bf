"""Block tables of requests, and the way of a preempted sequence's KV to the store and back.

`SequenceStore` is where KV goes when a request loses its blocks. It moves the data at once, between two steps, so a
block may be handed to another request as soon as `save` returns. A store may forget anything at any time: `load` says
how many tokens came back, and the scheduler recomputes the rest. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from typing import Protocol

from paceline_engine.core.block_pool import BlockPool, BlockPoolError
from paceline_engine.core.request import Request, RequestStatus


class SequenceStore(Protocol):
    """Keeps KV of preempted sequences, keyed by their content (namespace, salt, tokens)."""

    def save(self, request: Request) -> int:
        """Copy KV of the first num_computed_tokens out of the request's blocks; how many tokens were kept."""
        ...

    def load(self, request: Request, num_tokens: int) -> int:
        """Copy KV of up to `num_tokens` leading tokens into the request's blocks; how many came back."""
        ...

    def drop(self, request: Request) -> None:
        """The request won't come back for its KV, if there is any."""
        ...


class KVManager:
    """Gives requests blocks, takes them back, and keeps count of what was offloaded and restored."""

    def __init__(self, pool: BlockPool, block_size: int, store: SequenceStore | None = None) -> None:
        if block_size < 1:
            raise ValueError(f"block size must be at least 1 token, not {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.num_offloaded_sequences = 0
        self.num_restored_sequences = 0
        self._store = store

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, rounded up."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks the request lacks to hold its first `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(request.block_ids))

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the block table to hold `num_tokens` tokens; the new ids, or None if too few blocks are free."""
        missing = self.num_missing_blocks(request, num_tokens)
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

    def release(self, request: Request) -> None:
        """Give all blocks back, last first, so that a sequence's tail is reused before its head."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()
        request.num_computed_tokens = 0

    def preempt(self, request: Request) -> None:
        """Take the request's blocks, after its KV went to the store if there is one."""
        if self._store is not None and request.num_computed_tokens > 0:
            request.num_offloaded_tokens = self._store.save(request)
            self.num_offloaded_sequences += request.num_offloaded_tokens > 0
        self.release(request)

    def restore(self, request: Request) -> None:
        """Bring offloaded KV into the request's blocks and set num_computed_tokens to what came back.

        At least one token stays to be computed, since its logits yield the next token.
        """
        wanted = min(request.num_offloaded_tokens, request.num_tokens - 1)
        request.num_offloaded_tokens = 0
        if self._store is None or wanted == 0:
            return
        restored = self._store.load(request, wanted)
        if not 0 <= restored <= wanted:
            raise BlockPoolError(f"the store returned {restored} tokens, {wanted} were asked for")
        request.num_computed_tokens = restored
        self.num_restored_sequences += restored > 0

    def finish(self, request: Request) -> None:
        """Give back everything the request holds, here and in the store."""
        self.release(request)
        if self._store is not None:
            self._store.drop(request)
        request.num_offloaded_tokens = 0

    def check_integrity(self, requests: list[Request]) -> None:
        """Raise BlockPoolError unless the pool balances and `requests` hold exactly the held blocks, each its own."""
        self.pool.check_integrity()
        held = [block_id for request in requests for block_id in request.block_ids]
        if len(set(held)) != len(held):
            raise BlockPoolError("two requests hold the same block")
        if len(held) + self.pool.num_free_blocks != self.pool.num_blocks:
            raise BlockPoolError(
                f"requests hold {len(held)} blocks, {self.pool.num_free_blocks} are free, total {self.pool.num_blocks}"
            )
        for request in requests:
            if request.status is not RequestStatus.RUNNING and request.block_ids:
                raise BlockPoolError(f"{request.status} request {request.request_id} holds blocks")
            if request.num_computed_tokens > len(request.block_ids) * self.block_size:
                raise BlockPoolError(f"request {request.request_id} has more computed tokens than its blocks hold")
