"""A radix tree over token sequences that finds the same blocks as the hash chain, and more: how far tokens agree.

Edges carry tokens, not tensors; a block is noted at the depth at which its last token stands. Only whole blocks can be
shared, so both indexes yield the same block ids. What the tree adds is the number of tokens beyond the last whole block
that were computed before and must be computed again: the loss of matching complete blocks, which grows with branching
(compare SGLang's token-level tree, arXiv 2312.07104). Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from paceline_engine.records import Struct


class RadixError(RuntimeError):
    """The tree's books don't balance. Always a programming error."""


class _Node:
    """Tokens from depth `start` on. `blocks`: depth of a block's end, within this node, to ids with that content."""

    __slots__ = ("blocks", "children", "parent", "start", "tokens")

    def __init__(self, tokens: list[int], start: int, parent: _Node | None) -> None:
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.blocks: dict[int, list[int]] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """block_ids: whole blocks found, first first. num_tokens: leading tokens that some cached sequence has."""

    block_ids: list[int]
    num_tokens: int


class RadixIndex:
    """One tree for each root (salt and adapter), whose sequences share nothing with another's."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[Hashable, _Node] = {}
        self._node_of: dict[int, tuple[_Node, Hashable]] = {}

    def __len__(self) -> int:
        return len(self._node_of)

    def match(self, root: Hashable, token_ids: Sequence[int], max_blocks: int) -> Match:
        """The longest cached prefix of `token_ids`, in whole blocks (at most `max_blocks`) and in tokens."""
        node = self._roots.get(root)
        block_ids: list[int] = []
        depth = 0
        whole = True
        while node is not None:
            common = _common_length(node.tokens, token_ids, node.start)
            depth = node.start + common
            while whole and len(block_ids) < max_blocks:
                end = (len(block_ids) + 1) * self._block_size
                if end > depth or end > node.end:
                    break
                copies = node.blocks.get(end)
                if copies is None:
                    whole = False
                else:
                    block_ids.append(copies[0])
            if common < len(node.tokens) or depth >= len(token_ids):
                break
            node = node.children.get(token_ids[depth])
        return Match(block_ids, depth)

    def add(self, root: Hashable, token_ids: Sequence[int], block_id: int) -> None:
        """Note a block that ends with `token_ids`' last token; the sequence is a whole number of blocks long."""
        if len(token_ids) % self._block_size or not token_ids:
            raise RadixError(f"{len(token_ids)} tokens are not a whole number of blocks of {self._block_size}")
        if block_id in self._node_of:
            raise RadixError(f"block {block_id} is in the tree already")
        node = self._path(root, token_ids)
        node.blocks.setdefault(len(token_ids), []).append(block_id)
        self._node_of[block_id] = (node, root)

    def _path(self, root: Hashable, token_ids: Sequence[int]) -> _Node:
        """The node in which depth len(token_ids) lies, made if need be."""
        node = self._roots.setdefault(root, _Node([], 0, None))
        while True:
            common = _common_length(node.tokens, token_ids, node.start)
            depth = node.start + common
            if depth == len(token_ids):
                return node
            if common < len(node.tokens):
                node = self._split(node, common)
            child = node.children.get(token_ids[depth])
            if child is None:
                if not node.children and node.parent is not None:
                    node.tokens.extend(token_ids[depth:])  # A leaf grows; no node for each block.
                    return node
                child = node.children[token_ids[depth]] = _Node(list(token_ids[depth:]), depth, node)
                return child
            node = child

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node after its first `at` tokens; the new upper half, which keeps the parent."""
        assert node.parent is not None
        upper = _Node(node.tokens[:at], node.start, node.parent)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.start, node.parent = node.tokens[at:], node.start + at, upper
        upper.children[node.tokens[0]] = node
        for end in [end for end in node.blocks if end <= upper.end]:
            copies = upper.blocks[end] = node.blocks.pop(end)
            for block_id in copies:
                self._node_of[block_id] = (upper, self._node_of[block_id][1])
        return upper

    def remove(self, block_id: int) -> None:
        """Forget a block, and the tokens that only led to it."""
        node, root = self._node_of.pop(block_id)
        for end, copies in node.blocks.items():
            if block_id in copies:
                copies.remove(block_id)
                if not copies:
                    del node.blocks[end]
                break
        self._prune(node, root)

    def _prune(self, node: _Node, root: Hashable) -> None:
        while not node.children:
            length = max(node.blocks, default=node.start) - node.start
            del node.tokens[length:]
            if node.tokens or node.parent is None:
                break
            siblings = node.parent.children
            for first, sibling in siblings.items():
                if sibling is node:
                    del siblings[first]
                    break
            node = node.parent
        if len(node.children) == 1 and node.parent is not None:
            self._merge_child(node)
        elif node.parent is None and not node.children:
            self._roots.pop(root, None)

    def _merge_child(self, node: _Node) -> None:
        (child,) = node.children.values()
        node.tokens += child.tokens
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        for end, copies in child.blocks.items():
            node.blocks[end] = copies
            for block_id in copies:
                self._node_of[block_id] = (node, self._node_of[block_id][1])

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._node_of.clear()

    def check_integrity(self) -> None:
        """Raise RadixError unless links, depths and block notes agree."""
        noted: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if not node.children and not node.blocks and node.parent is not None:
                raise RadixError("a leaf without blocks")
            for first, child in node.children.items():
                if child.parent is not node or child.start != node.end or child.tokens[0] != first:
                    raise RadixError(f"a child at depth {child.start} is linked wrongly")
                stack.append(child)
            for end, copies in node.blocks.items():
                if not node.start < end <= node.end or end % self._block_size:
                    raise RadixError(f"a block that ends at {end} is noted in tokens {node.start} to {node.end}")
                noted.update(copies)
                if any(self._node_of[block_id][0] is not node for block_id in copies):
                    raise RadixError("a block is noted in one node and looked up in another")
        if noted != set(self._node_of):
            raise RadixError(f"{len(noted)} blocks noted, {len(self._node_of)} looked up")


def _common_length(tokens: list[int], token_ids: Sequence[int], start: int) -> int:
    """How many of a node's tokens `token_ids` has from `start` on. Slices compare in C; bisect to where they differ."""
    low, high = 0, min(len(tokens), len(token_ids) - start)
    if list(token_ids[start : start + high]) == tokens[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if list(token_ids[start + low : start + middle]) == tokens[low:middle]:
            low = middle
        else:
            high = middle
    return low


class BranchingLoss(Struct, frozen=True, kw_only=True):
    """Tokens of the sequences, of those computed before, and of those found again in whole blocks."""

    num_tokens: int
    num_seen_tokens: int
    num_block_tokens: int

    @property
    def lost_share(self) -> float:
        """Share of the tokens seen before that whole blocks can't give back."""
        return 1.0 - self.num_block_tokens / self.num_seen_tokens if self.num_seen_tokens else 0.0


def branching_loss(sequences: Sequence[Sequence[int]], block_size: int) -> BranchingLoss:
    """What whole blocks lose on sequences that come one after another, each cached in full (nothing is evicted)."""
    tree = RadixIndex(1)  # Blocks of one token: its matches are what a token-level cache would find.
    num_seen = num_found = num_ids = 0
    blocks = RadixIndex(block_size)
    for sequence in sequences:
        num_seen += tree.match(None, sequence, 0).num_tokens
        found = len(blocks.match(None, sequence, len(sequence)).block_ids)
        num_found += found * block_size
        if sequence:
            tree.add(None, sequence, num_ids)
        for end in range((found + 1) * block_size, len(sequence) + 1, block_size):
            num_ids += 1
            blocks.add(None, sequence[:end], num_ids)
        num_ids += 1
    return BranchingLoss(num_tokens=sum(map(len, sequences)), num_seen_tokens=num_seen, num_block_tokens=num_found)
