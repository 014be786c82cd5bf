"""Physical KV blocks: who holds which, and in which order free ones are handed out.

Free blocks form two intrusive doubly linked lists, so taking one, returning one and taking one out of the middle are
all O(1). Blocks whose contents nobody could find are handed out first; those that the prefix cache marked follow,
longest free first, so the list of marked free blocks is the cache's LRU order. The pool knows block ids, never their
contents, and imports neither tensors nor a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class BlockPoolError(RuntimeError):
    """The pool's books don't balance, or a caller broke its contract. Always a programming error."""


class Block:
    """One physical block. `prev` and `next` are set exactly while the block is free; `cached` if it can be found."""

    __slots__ = ("block_id", "cached", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.cached = False
        self.prev: Block | None = None
        self.next: Block | None = None


class FreeList:
    """Doubly linked list of free blocks between two sentinels, which spare every end-of-list case."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.prev = self._head
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Put a block at the back: it is reused last."""
        last = self._tail.prev
        assert last is not None
        last.next = block
        block.prev = last
        block.next = self._tail
        self._tail.prev = block
        self._length += 1

    def remove(self, block: Block) -> None:
        """Take a free block out, wherever it stands."""
        if block.prev is None or block.next is None:
            raise BlockPoolError(f"block {block.block_id} isn't in the free list")
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = None
        self._length -= 1

    def pop_front(self) -> Block:
        """Take the block that has been free longest."""
        first = self._head.next
        if first is None or first is self._tail:
            raise BlockPoolError("no free block")
        self.remove(first)
        return first

    def block_ids(self) -> list[int]:
        """Ids from front to back, read by walking the links (for checks and tests; O(free blocks))."""
        ids: list[int] = []
        node = self._head.next
        while node is not None and node is not self._tail:
            ids.append(node.block_id)
            node = node.next
        return ids


class BlockPool:
    """`num_blocks` blocks with reference counts.

    order: the order in which the ids are first handed out; None is ascending. Physical ids carry no meaning, and tests
    permute them to prove it.
    """

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        ids = list(range(num_blocks)) if order is None else list(order)
        if sorted(ids) != list(range(num_blocks)):
            raise ValueError(f"order must be a permutation of range({num_blocks})")
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self._blocks[block_id] for block_id in ids)
        self._free_cached = FreeList(())
        self._forget: Callable[[int], None] = _nothing_to_forget

    @property
    def num_blocks(self) -> int:
        """All blocks, free or held."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, marked or not."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_cached_blocks(self) -> int:
        """Marked blocks that nobody holds."""
        return len(self._free_cached)

    def on_reuse(self, forget: Callable[[int], None]) -> None:
        """Have `forget` called with each marked block that is handed out anew; its contents are lost then."""
        self._forget = forget

    def allocate(self, count: int) -> list[int]:
        """Ids of `count` blocks, each now held once. Raises BlockPoolError, taking none, if fewer are free."""
        if count > self.num_free_blocks:
            raise BlockPoolError(f"{count} blocks wanted, {self.num_free_blocks} free")
        ids: list[int] = []
        for _ in range(count):
            block = (self._free if len(self._free) else self._free_cached).pop_front()
            if block.cached:
                block.cached = False
                self._forget(block.block_id)
            block.ref_count = 1
            ids.append(block.block_id)
        return ids

    def share(self, block_id: int) -> None:
        """One more holder of a block, held or free; a free one leaves the free list."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            self._list_of(block).remove(block)
        block.ref_count += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One holder fewer of each block, in the order given; those without holders become free."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count < 1:
                raise BlockPoolError(f"block {block_id} released but nobody holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._list_of(block).append(block)

    def mark_cached(self, block_id: int) -> None:
        """The held block's contents can be found from now on."""
        block = self._blocks[block_id]
        if block.ref_count < 1:
            raise BlockPoolError(f"block {block_id} marked as cached but nobody holds it")
        block.cached = True

    def unmark_cached(self, block_id: int) -> None:
        """The held block's contents can't be found any more; nobody is told."""
        block = self._blocks[block_id]
        if block.ref_count < 1:
            raise BlockPoolError(f"block {block_id} unmarked but nobody holds it")
        block.cached = False

    def unmark_all(self) -> None:
        """No block's contents can be found any more; nobody is told."""
        for block in self._blocks:
            block.cached = False
        while len(self._free_cached):
            self._free.append(self._free_cached.pop_front())

    def is_cached(self, block_id: int) -> bool:
        """Whether a block is marked, held or free."""
        return self._blocks[block_id].cached

    def _list_of(self, block: Block) -> FreeList:
        return self._free_cached if block.cached else self._free

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._blocks[block_id].ref_count

    def free_order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of free blocks in the order in which they would be handed out: unmarked ones, then marked ones."""
        return tuple(self._free.block_ids()), tuple(self._free_cached.block_ids())

    @classmethod
    def restored(
        cls,
        num_blocks: int,
        free: Sequence[int],
        free_cached: Sequence[int],
        held: Iterable[int],
        marked: Iterable[int],
    ) -> BlockPool:
        """A pool with these free blocks, in order. `held` has a block once a holder, `marked` all that can be found."""
        pool = cls(num_blocks)
        pool._free = FreeList(())
        for block_id in held:
            pool._blocks[block_id].ref_count += 1
        for block_id in marked:
            pool._blocks[block_id].cached = True
        for block_id in (*free, *free_cached):
            pool._list_of(pool._blocks[block_id]).append(pool._blocks[block_id])
        return pool

    def check_integrity(self) -> None:
        """Raise BlockPoolError unless free + cached + held = total and each unheld block is in its list once."""
        held = sum(1 for block in self._blocks if block.ref_count > 0)
        linked: list[int] = []
        for name, blocks, cached in (("free", self._free, False), ("cached", self._free_cached, True)):
            ids = blocks.block_ids()
            if len(ids) != len(blocks):
                raise BlockPoolError(f"{len(ids)} blocks linked as {name}, {len(blocks)} counted")
            for block_id in ids:
                block = self._blocks[block_id]
                if block.ref_count != 0 or block.cached != cached:
                    raise BlockPoolError(f"block {block_id} is in the {name} list, held {block.ref_count} times")
            linked += ids
        if len(set(linked)) != len(linked):
            raise BlockPoolError("a block is in the free lists twice")
        if len(linked) + held != len(self._blocks):
            raise BlockPoolError(f"{len(linked)} free and cached blocks + {held} held != {len(self._blocks)}")


def _nothing_to_forget(block_id: int) -> None:
    raise BlockPoolError(f"block {block_id} is marked as cached, but no cache is there to be told of its reuse")
