"""The token tree: the same blocks as a map of prefixes, links that hold, and the loss of whole-block matching."""

from __future__ import annotations

import random

import pytest

from paceline_engine.core.radix_index import RadixError, RadixIndex, branching_loss


def prefix_tokens(known: dict[int, tuple[object, tuple[int, ...]]], root: object, tokens: list[int]) -> int:
    """By definition: the most leading tokens that `tokens` shares with a noted sequence."""
    best = 0
    for other_root, other in known.values():
        if other_root == root:
            common = 0
            while common < min(len(other), len(tokens)) and other[common] == tokens[common]:
                common += 1
            best = max(best, common)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_random_use_equals_a_map_of_prefixes(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    tree = RadixIndex(size)
    known: dict[int, tuple[object, tuple[int, ...]]] = {}
    for block_id in range(200):
        root = rng.choice("xy")
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 6) * size)]
        whole = {(r, t) for r, t in known.values()}
        # A block is cached only behind all blocks before it.
        length = size
        while length < len(tokens) and (root, tuple(tokens[:length])) in whole:
            length += size
        tree.add(root, tokens[:length], block_id)
        known[block_id] = (root, tuple(tokens[:length]))
        if rng.random() < 0.4:
            leaf = max(rng.sample(sorted(known), min(5, len(known))), key=lambda name: len(known[name][1]))
            tree.remove(leaf)
            del known[leaf]
        tree.check_integrity()
        match = tree.match(root, tokens, 100)
        assert match.num_tokens == prefix_tokens(known, root, tokens)
        whole = {(r, t) for r, t in known.values()}
        count = 0
        while (root, tuple(tokens[: (count + 1) * size])) in whole and (count + 1) * size <= len(tokens):
            count += 1
        assert len(match.block_ids) == count
        assert [known[found][1] for found in match.block_ids] == [tuple(tokens[: (i + 1) * size]) for i in range(count)]
    for block_id in list(known):
        tree.remove(block_id)
    assert len(tree) == 0
    assert not tree._roots


def test_a_partial_block_and_a_block_noted_twice_are_refused():
    tree = RadixIndex(4)
    with pytest.raises(RadixError, match="whole number of blocks"):
        tree.add(None, [1, 2, 3], 0)
    tree.add(None, [1, 2, 3, 4], 0)
    with pytest.raises(RadixError, match="already"):
        tree.add(None, [5, 6, 7, 8], 0)


def test_whole_blocks_lose_what_lies_behind_a_branch():
    trunk = list(range(22))
    branches = [[*trunk, 100 + i, *range(200 + i, 210 + i)] for i in range(5)]
    loss = branching_loss(branches, 16)
    assert (loss.num_seen_tokens, loss.num_block_tokens) == (4 * 22, 4 * 16)
    assert loss.lost_share == pytest.approx(6 / 22)
    assert branching_loss(branches, 1).lost_share == 0
    assert branching_loss([], 16).lost_share == 0
