"""What the scheduler asks of the store that KV of prefixes comes back from, and what it hears.

Plain data and one Protocol: a store may be a tier of this process, a tiered store, or a recording's answers. Imports
neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline_engine.records import Struct

CHUNK_TOKENS = 256


def num_chunk_blocks(block_size: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Blocks of a chunk: whole ones, so that its hash is a link of the block chain."""
    return max(1, chunk_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A prompt that stored KV may save computing, and what computing it would come to.

    chain: the hash at the end of each whole chunk of the prompt; those before `first` are not needed. num_tokens: from
    there to the prompt's end. tokens_per_s: speed of prefill, 0 while it isn't known. queue_s: until prefill would
    begin. deadline_s: from now; what is not there by then is of no use. may_wait: else what isn't known by now isn't
    waited for. tenant: whose KV it is, for quotas.
    """

    request_id: str
    chain: Sequence[bytes]
    first: int
    num_tokens: int
    tokens_per_s: float
    queue_s: float
    deadline_s: float
    may_wait: bool
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLoad:
    """Chunks to write into blocks. chain: the hash at the end of each chunk of the prompt, up to the last one wanted.

    Those from `first` on go into block_ids, in order. num_present leading ones of these blocks have their KV already
    and others may be reading it: they must not be written. deadline_s and tenant: as in `Wanted`.
    """

    request_id: str
    chain: tuple[bytes, ...]
    first: int
    block_ids: tuple[int, ...]
    num_present: int
    deadline_s: float
    tenant: str


class Arrived(Struct, frozen=True, kw_only=True):
    """How far a load is: where each leading chunk that is in its blocks came from, and whether no more will come."""

    request_id: str
    tiers: tuple[str, ...]
    is_over: bool


class StoredKV(Protocol):
    """Finds, loads and keeps chunks of KV, keyed by hashes of the block chain. No call waits for a disk or network."""

    def find(self, wanted: Wanted) -> int | None:
        """How many leading chunks of the chain, those before `first` included, to load; None: ask again.

        At most `first` if nothing is worth it; else `begin` or `cancel` follows. A promise of nothing: chunks may be
        gone when they are loaded.
        """
        ...

    def begin(self, load: ChunkLoad) -> None:
        """Write chunks that were found into blocks that nobody else touches until the load is over or cancelled."""
        ...

    def poll(self) -> Sequence[Arrived]:
        """News of loads since the last call; of each at most one entry, which counts from the load's start."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request's lookup or load, if there is one: afterwards no block is written, and nothing told."""
        ...

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        """Keep a copy of a chunk, if it is worth it. The blocks may be reused as soon as this returns.

        False: there is no room for it now; offer it again.
        """
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Never bring these chunks back: what they hold may be wrong."""
        ...

    def clear(self) -> None:
        """Bring back nothing that was offered or stored until now."""
        ...


class LendsKV(Protocol):
    """Lends a prompt's chunks to another engine. No call waits for a disk or network."""

    def lend(
        self, request_id: str, chain: Sequence[bytes], block_ids: Sequence[int], seconds: float, tenant: str
    ) -> bool:
        """Lend the chunks of the chain in these blocks, which may be reused as soon as this returns.

        seconds: what that may take. tenant: whose KV it is. False if nothing will be lent.
        """
        ...
