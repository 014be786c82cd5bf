"""The block pool: order of reuse, reference counts, books that balance, and a check that notices when they don't."""

from __future__ import annotations

import random

import pytest

from paceline_engine.core.block_pool import BlockPool, BlockPoolError


def test_blocks_are_handed_out_in_order_and_reused_oldest_first():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([1])
    pool.release([0])
    assert pool.allocate(3) == [3, 1, 0]


def test_order_permutes_physical_ids():
    assert BlockPool(4, order=[2, 0, 3, 1]).allocate(4) == [2, 0, 3, 1]
    with pytest.raises(ValueError, match="permutation"):
        BlockPool(4, order=[0, 0, 1, 2])


def test_too_large_an_allocation_takes_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(BlockPoolError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2
    pool.check_integrity()


def test_a_shared_block_stays_held_until_its_last_holder_leaves():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free_blocks) == (1, 1)
    pool.release([block])
    assert pool.num_free_blocks == 2


def test_a_free_block_can_be_taken_out_of_the_middle():
    pool = BlockPool(5)
    pool.share(2)
    pool.check_integrity()
    assert pool.allocate(4) == [0, 1, 3, 4]


def test_releasing_a_free_block_is_an_error():
    pool = BlockPool(2)
    with pytest.raises(BlockPoolError, match="nobody holds it"):
        pool.release([0])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_an_empty_pool_is_refused(num_blocks):
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(num_blocks)


def test_check_integrity_notices_a_leak_and_a_double_free():
    leaked = BlockPool(3)
    leaked._free.pop_front()
    with pytest.raises(BlockPoolError):
        leaked.check_integrity()
    held_and_free = BlockPool(3)
    held_and_free._blocks[1].ref_count = 1
    with pytest.raises(BlockPoolError):
        held_and_free.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books(seed):
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 40))
    held: list[int] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.45:
            held += pool.allocate(rng.randint(0, pool.num_free_blocks))
        elif action < 0.6 and held:
            block = rng.choice(held)
            pool.share(block)
            held.append(block)
        else:
            rng.shuffle(held)
            count = rng.randint(0, len(held))
            pool.release(held[:count])
            del held[:count]
        pool.check_integrity()
        assert pool.num_free_blocks == pool.num_blocks - len(set(held))
