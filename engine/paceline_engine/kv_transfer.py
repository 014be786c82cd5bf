"""KV of preempted sequences on its way between the block pool and the key-value store's memory tier.

A sequence travels in chunks of up to CHUNK_TOKENS tokens (`kv_chunks`), keyed by what the KV is the state of:
namespace, tenant salt and all tokens up to the chunk's end. The tier checks key and checksum and may forget a chunk at
any time; the leading chunks that it still has are restored, the rest is recomputed.
"""

from __future__ import annotations

from paceline_api.identity import block_hash
from paceline_engine.core.request import Request
from paceline_engine.core.stored_kv import CHUNK_TOKENS, num_chunk_blocks
from paceline_engine.kv_chunks import ChunkCopier
from paceline_engine.paged_kv import PagedKV
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.base import Tier


class KVTransfer:
    """Implements `core.kv_manager.SequenceStore` on a pool and a tier."""

    def __init__(self, kv: PagedKV, tier: Tier, namespace_digest: str, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.tier = tier
        self._copier = ChunkCopier(kv)
        self._namespace = bytes.fromhex(namespace_digest)
        self._block_size = kv.block_size
        self._chunk_tokens = num_chunk_blocks(kv.block_size, chunk_tokens) * kv.block_size
        self._chunks_of: dict[str, list[ChunkKey]] = {}

    def save(self, request: Request) -> int:
        """Put the computed tokens' KV into the tier, first chunk first, as far as the tier holds it."""
        keys: list[ChunkKey] = []
        num_saved = 0
        for key in self._chunk_keys(request):
            payload = self._copier.read(request.block_ids[num_saved // self._block_size :], key.num_tokens)
            # A tier that has no room but this sequence's own head refuses: the tail is no use without it.
            if not self.tier.put(key, payload.data, parent=keys[-1] if keys else None):
                break
            keys.append(key)
            num_saved += key.num_tokens
        if keys:
            self._chunks_of[request.request_id] = keys
        return num_saved

    def load(self, request: Request, num_tokens: int, start: int = 0) -> int:
        """Write the leading chunks that the tier still has into the request's blocks; the store then forgets them.

        Tokens before `start` are there already and are neither read nor written.
        """
        num_loaded = 0
        for key in self._chunks_of.get(request.request_id, ()):
            skipped = min(max(0, start - num_loaded), key.num_tokens)
            if skipped < key.num_tokens:
                payload = self.tier.get(key)
                if payload is None:
                    break
                block_ids = request.block_ids[num_loaded // self._block_size :]
                self._copier.write(block_ids, key.num_tokens, payload, skipped)
            num_loaded += key.num_tokens
        self.drop(request)
        return min(num_loaded, num_tokens)

    def drop(self, request: Request) -> None:
        """Forget a request's chunks."""
        for key in self._chunks_of.pop(request.request_id, ()):
            self.tier.delete(key)

    def clear(self) -> None:
        """Forget all chunks."""
        for keys in self._chunks_of.values():
            for key in keys:
                self.tier.delete(key)
        self._chunks_of.clear()

    def _chunk_keys(self, request: Request) -> list[ChunkKey]:
        """Keys of the computed tokens' chunks; the last block of the last chunk may be partial."""
        keys: list[ChunkKey] = []
        chain: bytes | None = None
        total, block_size = request.num_computed_tokens, self._block_size
        for start in range(0, total, block_size):
            end = min(start + block_size, total)
            chain = block_hash(chain, request.token_ids[start:end], request.salt, request.adapter_digest)
            if end % self._chunk_tokens == 0 or end == total:
                first = (end - 1) // self._chunk_tokens * self._chunk_tokens
                keys.append(ChunkKey(self._namespace, chain, end - first))
        return keys
