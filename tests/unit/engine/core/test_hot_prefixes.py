"""The list of prefixes worth having: what is in it, in which order, and what is never in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_api.identity import chain_hashes
from paceline_engine.core.hot_prefixes import HotPrefixes, decoded

BLOCK, CHUNK_BLOCKS = 2, 2
CHUNK = BLOCK * CHUNK_BLOCKS


def hashes(*tokens: int, salt: str = "") -> list[bytes]:
    """Of chunks of equal tokens."""
    return chain_hashes([token for token in tokens for _ in range(CHUNK)], BLOCK, salt)


def listed(hot: HotPrefixes) -> list[tuple[bytes, ...]]:
    return decoded(hot.encoded(), CHUNK_BLOCKS)


def test_what_was_used_twice_comes_before_what_was_used_last():
    hot = HotPrefixes()
    hot.use(hashes(1, 2), CHUNK_BLOCKS)
    hot.use(hashes(3), CHUNK_BLOCKS)
    hot.use(hashes(1, 2), CHUNK_BLOCKS)
    hot.use(hashes(4), CHUNK_BLOCKS)
    assert listed(hot) == [tuple(hashes(1, 2)), tuple(hashes(4)), tuple(hashes(3))]


def test_prompts_that_share_their_start_are_each_listed_to_their_end():
    hot = HotPrefixes()
    for end in (5, 6, 7):
        hot.use(hashes(1, 2, end), CHUNK_BLOCKS)
    assert listed(hot) == [tuple(hashes(1, 2, end)) for end in (7, 6, 5)]


def test_a_part_of_a_chunk_does_not_count():
    hot = HotPrefixes()
    hot.use(hashes(1)[:-1], CHUNK_BLOCKS)
    assert not len(hot)


def test_no_token_and_no_salt_is_in_the_list():
    hot = HotPrefixes()
    secret = hashes(77_001, 77_001, salt="of a tenant")
    hot.use(secret, CHUNK_BLOCKS)
    text = hot.encoded()
    assert b"of a tenant" not in text
    assert len(text) < len(b"".join(secret)) + 64


def test_what_may_be_wrong_takes_with_it_what_follows():
    hot = HotPrefixes()
    hot.use(hashes(1, 2, 3), CHUNK_BLOCKS)
    hot.forget([hashes(1, 2)[-1]])
    assert listed(hot) == [tuple(hashes(1))]
    hot.clear()
    assert listed(hot) == []


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=30), st.integers(1, 12))
def test_it_is_bounded_and_every_chain_begins_at_a_start(prompts: list[list[int]], limit: int):
    hot = HotPrefixes(limit)
    used: set[tuple[bytes, ...]] = set()
    for prompt in prompts:
        hot.use(hashes(*prompt), CHUNK_BLOCKS)
        used |= {tuple(hashes(*prompt[:end])) for end in range(1, len(prompt) + 1)}
        assert len(hot) <= limit
    chains = listed(hot)
    assert set(chains) <= used
    assert len({chain[-1] for chain in chains}) == len(chains)
    chunks = {chain[end - 1] for chain in chains for end in range(CHUNK_BLOCKS, len(chain) + 1, CHUNK_BLOCKS)}
    assert len(chunks) == len(hot)


@given(st.data())
def test_a_list_with_a_changed_bit_is_refused(data: st.DataObject):
    hot = HotPrefixes()
    hot.use(hashes(1, 2), CHUNK_BLOCKS)
    text = bytearray(hot.encoded())
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="not a list of prefixes"):
        decoded(bytes(text), CHUNK_BLOCKS)


@pytest.mark.parametrize("payload", [b"", b"x", b"\x93\x01\xc4\x00\xc4\x01\x90", b"\x92\x02\x90"])
def test_anything_else_is_refused(payload: bytes):
    with pytest.raises(ValueError, match="not a list of prefixes"):
        decoded(payload, CHUNK_BLOCKS)
