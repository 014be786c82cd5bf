"""The most valuable stored prefixes, brought to the device before the engine is ready.

An engine that ends leaves a list of them in its store, and the next one reads it. The list is a chunk under a key of
its own: what seals, bounds and forgets chunks does so with it. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from paceline_api.identity import DIGEST_SIZE
from paceline_engine.core.hot_prefixes import HotPrefixes, decoded
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import UNKNOWN
from paceline_engine.core.request import Request
from paceline_engine.core.step_log import RecordingPrefixes
from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.messages import SamplingParams
from paceline_engine.prefix_store import PrefixStore
from paceline_engine.sizing import SetupError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.level import Level
from paceline_kvstore.tiered.pool import Job

# Blocks that are filled, of the whole pool.
POOL_SHARE = 0.5
READ_SECONDS = 2.0
PROGRESS_SECONDS = 1.0
POLL_SECONDS = 0.05
_LIST = blake2b(b"the most valuable prefixes", digest_size=DIGEST_SIZE).digest()

logger = logging.getLogger(__name__)


class WarmUp:
    """Brings back what the last engine's list says, and writes this engine's. seconds: what bringing back may take.

    Raises SetupError if no tier can have the list.
    """

    def __init__(self, prefixes: PrefixStore, stored: StoredPrefixes, seconds: float) -> None:
        self._prefixes = prefixes
        self._stored = stored
        self._seconds = seconds
        self._levels = [level for level in prefixes.store.levels if level.options.is_durable]
        if not self._levels:
            raise SetupError("kv-store-warm-up: no tier of the KV store outlives the engine: add a disk, a node or s3")
        self._key = ChunkKey(prefixes.namespace, _LIST, 1)
        self._hot = stored.hot = HotPrefixes()

    def run(self, kv: KVManager) -> int:
        """Before the first request; how many tokens came."""
        news = threading.Event()
        self._prefixes.on_news(news.set)
        num_tokens = bring_back(kv, self._stored, self._read(), self._seconds, news)
        if isinstance(self._stored.store, RecordingPrefixes):
            self._stored.store.take_answers()  # No step was planned by them.
        return num_tokens

    def save(self) -> None:
        """After the last request: have the list written instead of the one before. The store's drain waits for that."""
        for level in self._levels[:1]:
            payload = self._hot.encoded()

            def write(level: Level = level, payload: bytes = payload) -> None:
                level.delete(self._key)
                level.write(self._key, payload, None, "", durable=False)

            level.writes.submit(Job(write, lambda: None, len(payload)))

    def _read(self) -> list[tuple[bytes, ...]]:
        """Chains of block hashes, most valuable first; none if there is no list, or none that can be read."""
        for level in self._levels:
            payload = level.read(self._key, READ_SECONDS)
            if payload is not None:
                try:
                    return decoded(payload, self._stored.chunk_blocks)
                except ValueError as error:
                    logger.warning("%s: %s", level.name, error)
        return []


def bring_back(
    kv: KVManager,
    stored: StoredPrefixes,
    chains: Sequence[tuple[bytes, ...]],
    seconds: float,
    news: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Load chains into the prefix cache, until the time or the share of the pool is used up; how many tokens came.

    No request may be there. news: set whenever the store has some.
    """
    begin = clock()
    room, num_tokens, told = int(kv.pool.num_blocks * POOL_SHARE), 0, begin
    for index, chain in enumerate(chains):
        request = _request(index, chain[: room // stored.chunk_blocks * stored.chunk_blocks], kv.block_size)
        if not request.block_hashes or clock() - begin >= seconds:
            break
        _load(kv, stored, request, begin + seconds, news, clock)
        num_loaded = sum(request.loaded_tokens.values())
        num_tokens += num_loaded
        room -= num_loaded // kv.block_size
        if clock() - told >= PROGRESS_SECONDS:
            told = clock()
            logger.info("warm-up: %d tokens of %d prefixes in %.1f s", num_tokens, index + 1, told - begin)
    logger.info("warm-up: %d tokens of stored KV in %.1f s", num_tokens, clock() - begin)
    return num_tokens


def _load(
    kv: KVManager,
    stored: StoredPrefixes,
    request: Request,
    until: float,
    news: threading.Event,
    clock: Callable[[], float],
) -> None:
    """One chain, until all of it is here or won't come."""
    while True:
        now = clock()
        if now >= until:
            stored.give_way()  # What has come stays.
            stored.drop(request)
            return
        waits = stored.begin(request, kv.find_cached(request), now, 0.0, 0, in_flight=False)
        if not waits and not stored.num_loads:
            return
        news.wait(min(POLL_SECONDS, until - now))
        news.clear()
        stored.step(clock())


def _request(index: int, chain: Iterable[bytes], block_size: int) -> Request:
    """A request for a chain whose tokens nobody knows."""
    hashes = list(chain)
    num_tokens = len(hashes) * block_size + 1
    return Request(
        request_id=f"warm-up/{index}",
        token_ids=[UNKNOWN] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        max_total_tokens=num_tokens + 1,
        block_hashes=hashes,
    )
