"""Block identity: stable between processes, and different whenever the state would be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_api.identity import NamespaceFields, block_hash, chain_hashes, namespace_digest

BASE = NamespaceFields(
    model="m",
    weights_digest="aa",
    tokenizer_digest="bb",
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    rope="theta=10000",
)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@pytest.mark.parametrize("name", [field.name for field in fields(NamespaceFields)])
def test_every_field_changes_the_namespace(name: str) -> None:
    value = getattr(BASE, name)
    changed = replace(BASE, **{name: value + 1 if isinstance(value, int) else value + "x"})
    assert namespace_digest(changed) != namespace_digest(BASE)


def test_moving_text_between_fields_changes_the_namespace() -> None:
    left = replace(BASE, weights_digest="ab", tokenizer_digest="c")
    right = replace(BASE, weights_digest="a", tokenizer_digest="bc")
    assert namespace_digest(left) != namespace_digest(right)


def test_equal_in_another_process_with_another_hash_seed() -> None:
    code = "from paceline_api.identity import block_hash; print(block_hash(None, [1, 2, 3], 's').hex())"
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, check=True, capture_output=True, text=True
    )
    assert out.stdout.strip() == block_hash(None, [1, 2, 3], "s").hex()


def test_the_wire_value_is_frozen() -> None:
    # Stores outlive releases: a change of this value needs a new layout version.
    assert block_hash(None, range(16), "").hex() == "e436cdd5b1851f34c34adac477cef58a13837836d05e0221739d9703a8b0995a"


@given(tokens=TOKENS, size=st.integers(1, 20))
def test_only_full_blocks_have_hashes(tokens: list[int], size: int) -> None:
    assert len(chain_hashes(tokens, size)) == len(tokens) // size


@given(tokens=TOKENS, more=TOKENS, size=st.integers(1, 20))
def test_a_common_prefix_has_common_hashes(tokens: list[int], more: list[int], size: int) -> None:
    short, long = chain_hashes(tokens, size), chain_hashes(tokens + more, size)
    assert long[: len(short)] == short


def test_a_changed_token_changes_every_later_block() -> None:
    tokens = list(range(64))
    changed = [*tokens[:20], 999, *tokens[21:]]
    before, after = chain_hashes(tokens, 16), chain_hashes(changed, 16)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


def test_tenants_share_nothing() -> None:
    mine, yours = chain_hashes(range(64), 16, "mine"), chain_hashes(range(64), 16, "yours")
    assert not set(mine) & set(yours)


def test_a_salt_cannot_pose_as_tokens() -> None:
    assert block_hash(None, [1], "") != block_hash(None, [], "\x01\x00\x00\x00")


NAMES = st.text(max_size=12)


@given(one=st.tuples(NAMES, NAMES), other=st.tuples(NAMES, NAMES))
def test_salt_and_adapter_are_told_apart(one: tuple[str, str], other: tuple[str, str]) -> None:
    hashes = [block_hash(None, [1, 2], salt, adapter) for salt, adapter in (one, other)]
    assert (hashes[0] == hashes[1]) == (one == other)


def test_an_adapter_cannot_pose_as_a_salt() -> None:
    assert block_hash(None, [1], "x", "") != block_hash(None, [1], "", "x")


def test_a_short_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        block_hash(b"short", [1])
