"""A chunk's key changes with everything its bytes depend on, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_api.identity import NamespaceFields, chain_hashes, namespace_digest
from paceline_kvstore import ChunkKey, ForeignChunk, codec

TEXT = st.text(max_size=8)
COUNT = st.integers(1, 2**20)
NAMESPACES = st.builds(
    NamespaceFields,
    **{field.name: COUNT if field.type == "int" else TEXT for field in fields(NamespaceFields)},
)
BASE = NamespaceFields(
    model="smollm2",
    weights_digest="aa",
    tokenizer_digest="bb",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=4,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    rope="theta=100000",
)


@dataclass(frozen=True)
class State:
    """All that a chunk of KV is the state of."""

    namespace: NamespaceFields = BASE
    salt: str = "tenant-a"
    adapter: str = ""
    tokens: tuple[int, ...] = (5, 6, 7, 8)
    rank: int = 0


def key_of(state: State) -> ChunkKey:
    """The key of the last full block's end, as the engine makes it."""
    digest = bytes.fromhex(namespace_digest(state.namespace))
    chain = chain_hashes(state.tokens, 4, state.salt, state.adapter)[-1]
    return ChunkKey(digest, chain, len(state.tokens), state.rank)


STATES = st.builds(
    State,
    namespace=NAMESPACES | st.just(BASE),
    salt=TEXT,
    adapter=TEXT,
    tokens=st.integers(1, 3).flatmap(
        lambda blocks: st.tuples(*[st.integers(0, 2**32 - 1)] * (4 * blocks))  # whole blocks: partial ones have no key
    ),
    rank=st.integers(0, 8),
)


@given(STATES, STATES)
def test_two_states_share_a_key_only_if_they_are_the_same(one: State, other: State) -> None:
    assert (key_of(one) == key_of(other)) == (one == other)


@given(STATES, st.sampled_from([field.name for field in fields(NamespaceFields)]), st.data())
def test_changing_any_one_field_of_the_namespace_gives_another_key(
    state: State, name: str, data: st.DataObject
) -> None:
    value = getattr(state.namespace, name)
    other = data.draw((COUNT if isinstance(value, int) else TEXT).filter(lambda drawn: drawn != value))
    changed = replace(state, namespace=replace(state.namespace, **{name: other}))
    chunk = codec.encode(key_of(state), b"KV")
    assert key_of(changed) != key_of(state)
    with pytest.raises(ForeignChunk):
        codec.decode(chunk, key_of(changed))


@given(STATES, STATES, st.sampled_from(["salt", "adapter", "tokens", "rank"]))
def test_changing_tenant_adapter_tokens_or_rank_alone_gives_another_key(one: State, other: State, name: str) -> None:
    changed = replace(one, **{name: getattr(other, name)})
    assert (key_of(changed) == key_of(one)) == (changed == one)


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_another_process_with_another_hash_seed_makes_the_same_key(seed: str) -> None:
    code = (
        "from paceline_api.identity import NamespaceFields, chain_hashes, namespace_digest\n"
        "from paceline_kvstore import ChunkKey\n"
        f"namespace = namespace_digest({BASE!r})\n"
        "chain = chain_hashes((5, 6, 7, 8), 4, 'tenant-a')[-1]\n"
        "print(ChunkKey(bytes.fromhex(namespace), chain, 4).to_bytes().hex())\n"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True)
    assert out.stdout.strip() == key_of(State()).to_bytes().hex()
