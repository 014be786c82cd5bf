"""The key of a chunk: everything that decides whether its bytes are the right ones. Must not do I/O."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

DIGEST_BYTES = 32
COUNT_MAX = 2**32 - 1

_WIRE = struct.Struct("<32s32sII")
KEY_BYTES = _WIRE.size


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Identity of one run of tokens' KV over all layers, as one rank holds it.

    namespace: 32-byte digest of model, weights, layout (`paceline_api.identity.namespace_digest`, as raw bytes).
    chain: 32-byte chain hash that covers the tokens up to the chunk's end and the tenant's salt.
    num_tokens: tokens in the chunk. rank: tensor-parallel rank that wrote it.
    """

    namespace: bytes
    chain: bytes
    num_tokens: int
    rank: int = 0

    def __post_init__(self) -> None:
        # Keys are made by the thousand: nothing here but what each of them needs.
        if len(self.namespace) != DIGEST_BYTES or len(self.chain) != DIGEST_BYTES:
            name, digest = (
                ("chain", self.chain) if len(self.namespace) == DIGEST_BYTES else ("namespace", self.namespace)
            )
            raise ValueError(f"a chunk key's {name} has {DIGEST_BYTES} bytes, this one {len(digest)}")
        if not 1 <= self.num_tokens <= COUNT_MAX:
            raise ValueError(f"a chunk holds 1 to {COUNT_MAX} tokens, not {self.num_tokens}")
        if not 0 <= self.rank <= COUNT_MAX:
            raise ValueError(f"a rank is 0 to {COUNT_MAX}, not {self.rank}")

    def __hash__(self) -> int:
        # The chain alone tells almost all keys apart, and bytes remember their hash.
        return hash(self.chain)

    def to_bytes(self) -> bytes:
        """Wire form, KEY_BYTES long: namespace, chain, num_tokens and rank as little-endian u32."""
        return _WIRE.pack(self.namespace, self.chain, self.num_tokens, self.rank)

    @classmethod
    def from_bytes(cls, wire: bytes | bytearray | memoryview) -> Self:
        """The key of a wire form. ValueError if the length or a count is wrong."""
        if len(wire) != KEY_BYTES:
            raise ValueError(f"a chunk key's wire form has {KEY_BYTES} bytes, this one {len(wire)}")
        namespace, chain, num_tokens, rank = _WIRE.unpack(wire)
        return cls(namespace, chain, num_tokens, rank)

    def __str__(self) -> str:
        return f"{self.namespace.hex()[:8]}/{self.chain.hex()[:16]}+{self.num_tokens}@{self.rank}"
