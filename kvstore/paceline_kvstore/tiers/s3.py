"""The S3 tier: chunks in a bucket that a fleet shares.

Every chunk is verified on arrival: key, namespace, length, checksum. What fails is counted in `quarantine` and is a
miss; the next put of its key overwrites it. An object that is gone is a miss. Puts are written behind: True means
taken, `durable=True` or `flush` mean stored. Small chunks that follow one another share an object.

Use it through `open_s3`: by itself it raises TierFault for a fault of the server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from paceline_kvstore import codec
from paceline_kvstore.breaker import Breaker
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import KVStoreError, TierFault
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.s3 import pack
from paceline_kvstore.s3.client import Bucket, Missing
from paceline_kvstore.s3.counts import Counts, S3Stats
from paceline_kvstore.s3.names import object_name, tenant_digest
from paceline_kvstore.s3.objects import Found, Objects
from paceline_kvstore.s3.pack import Span
from paceline_kvstore.s3.places import Places
from paceline_kvstore.s3.queue import Entry, WriteQueue
from paceline_kvstore.s3.reader import Reader
from paceline_kvstore.s3.session import make_session
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.s3.writer import Writer, spans_of
from paceline_kvstore.tiers.base import Lease
from paceline_kvstore.tiers.guarded import GuardedTier, copy_into


def open_s3(settings: S3Settings) -> GuardedTier:
    """The tier behind its breakers. KVStoreError if boto3 is missing or the credentials can't be read."""
    return GuardedTier(S3Tier(settings), settings.breaker)


class S3Tier:
    """Implements `Tier`, except that a fault of the server is raised as TierFault."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.quarantine = Quarantine()
        self._counts = Counts()
        self._places = Places()
        session = make_session(settings)
        reads = Bucket(session, settings, connections=settings.read_workers, read_timeout=settings.read_timeout)
        # A worker's own requests and the parts of multipart uploads.
        writes = Bucket(session, settings, connections=2 * settings.write_workers, read_timeout=settings.write_timeout)
        self._reader = Reader(reads, settings, self._counts)
        self._writer = Writer(writes, self._reader, self._places, settings, self._counts)
        self._objects = Objects(writes, self._reader, self._writer, settings)
        self._queue = WriteQueue(self._writer.store, settings, Breaker(settings.breaker), self._counts)
        self._deleted_bytes = 0
        self._is_closed = False

    @property
    def stats(self) -> S3Stats:
        return self._counts.copy()

    @property
    def bytes_used(self) -> int:
        """Bytes that this process stored and queues, less what it deleted; what others stored is not known."""
        return max(self._counts.copy().bytes_written + self._queue.num_bytes - self._deleted_bytes, 0)

    @property
    def capacity(self) -> int:
        return self.settings.capacity

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        if not durable and self._places.find(key) is not None:
            self._counts.add(puts=1, existing=1)
            return True
        size = codec.encoded_size(memoryview(payload).nbytes)
        if self.bytes_used + size > self.capacity or not self._queue.has_room(size):
            self._counts.add(refused=1, dropped=int(not self._queue.has_room(size)))
            return False
        entry = self._queue.offer(Entry(key, codec.encode(key, payload), parent, tenant_digest(tenant)))
        if entry is None:
            self._counts.add(refused=1)
            return False
        return not durable or self._queue.wait(entry, time.monotonic() + self.settings.drain_seconds)

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        """As `Tier.get`, given up after `deadline` seconds. Raises TierFault."""
        queued = self._queue.find(key)
        payload = codec.decode(queued, key) if queued is not None else self._fetch(key, self._until(deadline))
        self._counts.add(hits=int(payload is not None), misses=int(payload is None))
        return payload

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        payload = self.get(key, deadline=deadline)
        return None if payload is None else copy_into(target, payload)

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        payload = self.get(key, deadline=deadline)
        return None if payload is None else Lease(payload)

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        """As `Tier.contains`, given up after `deadline` seconds. Raises TierFault.

        Objects are looked at several at a time, more as long as they are there; a pack answers for all its chunks.
        """
        until = self._until(deadline)
        count = 0
        window = 1
        while (count := self._known(keys, count)) < len(keys):
            batch = keys[count : count + window]
            peeks = self._reader.peek([object_name(self.settings.prefix, key) for key in batch], until)
            has_pack = False
            for key, peek in zip(batch, peeks, strict=True):
                if peek is None:
                    continue
                name = object_name(self.settings.prefix, key)
                try:
                    spans = spans_of(peek, key)
                except KVStoreError as error:
                    self._refuse(key, name, error)
                    continue
                has_pack |= len(spans) > 1
                self._places.add(name, spans)
            if self._places.find(batch[0]) is None:
                return count
            window = 1 if has_pack else min(2 * window, self.settings.read_workers)
        return count

    def delete(self, key: ChunkKey) -> bool:
        """As `Tier.delete`. A chunk inside a pack is found only after a lookup of its chain. Raises TierFault."""
        withdrawn = self._queue.withdraw(lambda entry: entry.key == key, self._long())
        place = self._places.find(key)
        name = place.name if place is not None else object_name(self.settings.prefix, key)
        self._places.forget(key)
        removed = self._objects.remove_chunk(name, key, self._until(None))
        self._deleted_bytes += removed.num_bytes
        return bool(withdrawn or removed.chunks)

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        """As `Tier.clear`, over all objects that match in the bucket, whoever stored them. Raises TierFault."""

        def is_meant(entry: Entry) -> bool:
            is_theirs = tenant is None or entry.tenant == tenant_digest(tenant)
            return is_theirs and (namespace is None or entry.key.namespace == namespace)

        withdrawn = self._queue.withdraw(is_meant, self._long())
        self._places.clear()
        cleared = self._objects.clear(namespace, tenant, self._long())
        self._deleted_bytes += cleared.num_bytes
        return withdrawn + cleared.chunks

    def keys(self) -> Iterator[ChunkKey]:
        """Those stored, by a listing. Raises TierFault."""
        for found in self.objects():
            yield from found.keys

    def objects(self) -> Iterator[Found]:
        """What is stored under the prefix, by a listing. Raises TierFault."""
        return self._objects.list(None, self._long())

    def sweep(self, older_than_seconds: float = 86_400.0) -> int:
        """Abort multipart uploads that writers left behind when they died; how many. Raises TierFault."""
        return self._objects.sweep(datetime.now(UTC) - timedelta(seconds=older_than_seconds))

    def flush(self) -> bool:
        return self._queue.flush(time.monotonic() + self.settings.drain_seconds)

    def close(self) -> None:
        """Write what waits, for up to `drain_seconds`, and drop the rest."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.close(time.monotonic() + self.settings.drain_seconds)
        self._writer.close()
        self._reader.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts balance."""
        self._queue.check_integrity()

    def _until(self, deadline: float | None) -> float:
        return time.monotonic() + (self.settings.read_deadline if deadline is None else deadline)

    def _long(self) -> float:
        """Until when a rare operation on the whole bucket may wait for one answer."""
        return time.monotonic() + self.settings.write_timeout

    def _known(self, keys: Sequence[ChunkKey], count: int) -> int:
        """How many leading keys need no request, of which `count` are known to be there."""
        while count < len(keys) and (
            self._places.find(keys[count]) is not None or self._queue.find(keys[count]) is not None
        ):
            count += 1
        return count

    def _fetch(self, key: ChunkKey, until: float) -> memoryview | None:
        """Where it was seen last, then where its name says: another process may have moved it."""
        place = self._places.find(key)
        own = object_name(self.settings.prefix, key)
        candidates: list[tuple[str, Span | None]] = (
            [(own, None)] if place is None else [(place.name, place.span), (own, None)]
        )
        bad: tuple[str, KVStoreError] | None = None
        for name, span in candidates:
            try:
                return self._verified(key, name, self._reader.read(name, span, until))
            except Missing:
                self._places.forget(key)
                if name == own:
                    break
            except TierFault:
                raise
            except KVStoreError as error:
                self._places.forget(key)
                bad = (name, error)
        if bad is not None:
            self._refuse(key, *bad)
        return None

    def _verified(self, key: ChunkKey, name: str, data: memoryview) -> memoryview | None:
        """The payload in what was read: a chunk, or a pack that has it."""
        span = Span(0, len(data))
        if pack.is_pack(data):
            spans = pack.read_index(data[: pack.PEEK_BYTES], len(data))
            if key not in spans:
                raise Missing(name)
            self._places.add(name, spans)
            span = spans[key]
        elif self._places.find(key) is None:
            self._places.add(name, {key: span})
        return codec.decode(data[span.offset : span.offset + span.length], key)

    def _refuse(self, key: ChunkKey, name: str, error: KVStoreError) -> None:
        self.quarantine.add(key, name, error)
        self._counts.add(corrupt=1)
        if name == object_name(self.settings.prefix, key):
            self._writer.mark_bad(name)
