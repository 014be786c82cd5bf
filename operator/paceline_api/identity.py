"""Block identity: what a piece of cached attention state (KV) is the state *of*.

Two digests. The namespace digest covers everything about the model and its layout that could make KV wrong; the chain
hash covers the tokens and the tenant. Engine, router and store compute both with this module and nothing else, so that
equal digests mean equal state in every process, on every machine. BLAKE2b with 256 bits: tenant isolation rests on
digest equality alone, so the hash must resist collisions. Never Python's `hash`, which differs by process.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b

DIGEST_SIZE = 32
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFields:
    """Everything but tokens that KV depends on. Digests are hex strings; sizes are counts."""

    model: str
    weights_digest: str
    tokenizer_digest: str
    adapter_digest: str = ""
    dtype: str
    kv_dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: str
    attention: str = "full"
    tensor_parallel_size: int = 1
    layout_version: int = LAYOUT_VERSION


def _tagged(tag: str, value: str | int) -> bytes:
    """Length-prefixed tag and value with a type mark, so that no two field lists share an encoding."""
    kind, data = (b"i", str(value).encode()) if isinstance(value, int) else (b"s", value.encode())
    name = tag.encode()
    return struct.pack("<I", len(name)) + name + kind + struct.pack("<I", len(data)) + data


def namespace_digest(namespace: NamespaceFields) -> str:
    """Hex digest of the versioned, tagged, length-prefixed fields."""
    digest = blake2b(digest_size=DIGEST_SIZE, person=b"paceline-ns")
    for field in fields(namespace):
        digest.update(_tagged(field.name, getattr(namespace, field.name)))
    return digest.hexdigest()


def block_hash(parent: bytes | None, token_ids: Sequence[int], salt: str = "", adapter_digest: str = "") -> bytes:
    """32-byte hash of one block given its parent's.

    `salt` (the tenant's) and `adapter_digest` (content of the LoRA adapter that the tokens ran through; "" is the base
    model) count only in the first block; the chain spreads them. Each is tagged, so neither can pose as the other.
    """
    digest = blake2b(digest_size=DIGEST_SIZE, person=b"paceline-block")
    if parent is None:
        # Another first word where there is an adapter, so that hashes without one stay what they always were.
        root = b"root" + _tagged("salt", salt)
        digest.update(root if not adapter_digest else b"lora" + _tagged("adapter", adapter_digest) + root)
    else:
        if len(parent) != DIGEST_SIZE:
            raise ValueError(f"a parent hash has {DIGEST_SIZE} bytes, this one {len(parent)}")
        digest.update(b"next" + parent)
    digest.update(struct.pack(f"<I{len(token_ids)}I", len(token_ids), *token_ids))
    return digest.digest()


def chain_hashes(token_ids: Sequence[int], block_size: int, salt: str = "", adapter_digest: str = "") -> list[bytes]:
    """Hashes of the full blocks of a token sequence, first block first. A partial tail has none."""
    hashes: list[bytes] = []
    parent: bytes | None = None
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size], salt, adapter_digest)
        hashes.append(parent)
    return hashes
