"""KV of preempted sequences on its way between the block pool and the key-value store's memory tier.

A sequence travels in chunks of up to CHUNK_TOKENS tokens over all layers, [layers, 2, tokens, kv_heads, head_dim], of
8-bit KV with the scales [layers, 2, tokens, kv_heads, 1] behind it, keyed by what the KV is the state of: namespace,
tenant salt and all tokens up to the chunk's end. The tier checks key and checksum and may forget a chunk at any time;
the leading chunks that it still has are restored, the rest is recomputed.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline_api.identity import block_hash
from paceline_engine.core.request import Request
from paceline_engine.paged_kv import PagedKV
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.base import Tier

CHUNK_TOKENS = 256


class KVTransfer:
    """Implements `core.kv_manager.SequenceStore` on a pool and a tier."""

    def __init__(self, kv: PagedKV, tier: Tier, namespace_digest: str, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.tier = tier
        self._kv = kv
        self._namespace = bytes.fromhex(namespace_digest)
        # Whole blocks, so that a chunk's hash is a link of the block chain.
        self._chunk_tokens = max(1, chunk_tokens // kv.block_size) * kv.block_size
        self._planes = [kv.tensor.flatten(2, 3)]
        if kv.scales is not None:
            # Torch moves bytes where it doesn't move numbers of 8 bits.
            self._planes = [kv.tensor.view(torch.uint8).flatten(2, 3)]
            self._planes.append(kv.scales.flatten(2, 3).unsqueeze(-1))
        self._chunks_of: dict[str, list[ChunkKey]] = {}

    def save(self, request: Request) -> int:
        """Put the computed tokens' KV into the tier, first chunk first, as far as the tier holds it."""
        keys: list[ChunkKey] = []
        num_saved = 0
        for key in self._chunk_keys(request):
            payload = self._read(request, num_saved, key.num_tokens)
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
                self._write(request, num_loaded, key.num_tokens, payload, skipped)
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
        total, block_size = request.num_computed_tokens, self._kv.block_size
        for start in range(0, total, block_size):
            end = min(start + block_size, total)
            chain = block_hash(chain, request.token_ids[start:end], request.salt, request.adapter_digest)
            if end % self._chunk_tokens == 0 or end == total:
                first = (end - 1) // self._chunk_tokens * self._chunk_tokens
                keys.append(ChunkKey(self._namespace, chain, end - first))
        return keys

    def _slot_ids(self, request: Request, start: int, num_tokens: int) -> torch.Tensor:
        positions = torch.arange(start, start + num_tokens)
        block_size = self._kv.block_size
        blocks = torch.tensor(request.block_ids, dtype=torch.int64)[positions // block_size]
        return (blocks * block_size + positions % block_size).to(self._kv.tensor.device)

    def _read(self, request: Request, start: int, num_tokens: int) -> np.ndarray:
        slots = self._slot_ids(request, start, num_tokens)
        parts = [plane.index_select(2, slots).cpu().view(torch.uint8).numpy().reshape(-1) for plane in self._planes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _write(self, request: Request, start: int, num_tokens: int, payload: memoryview, skipped: int) -> None:
        slots = self._slot_ids(request, start + skipped, num_tokens - skipped)
        content, begin = np.frombuffer(payload, dtype=np.uint8), 0
        for plane in self._planes:
            part = torch.empty((*plane.shape[:2], num_tokens, *plane.shape[3:]), dtype=plane.dtype)
            part.view(torch.uint8).numpy().reshape(-1)[:] = content[begin : begin + part.nbytes]
            begin += part.nbytes
            plane.index_copy_(2, slots, part[:, :, skipped:].to(plane.device))
