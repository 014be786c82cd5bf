"""Whole objects: what a bucket holds, removing chunks from it, tidying up after writers that died."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.s3.client import Bucket, Missing
from paceline_kvstore.s3.names import key_of, namespace_prefix, object_name, tenant_digest
from paceline_kvstore.s3.pack import OBJECT_BYTES_MAX
from paceline_kvstore.s3.queue import Entry
from paceline_kvstore.s3.reader import Reader
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.s3.writer import TENANT, Writer, spans_of

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Found:
    """One object and the chunks in it; none if it is bad. Size in bytes."""

    name: str
    keys: tuple[ChunkKey, ...]
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal took away."""

    chunks: int = 0
    num_bytes: int = 0


class Objects:
    """The rare, slow operations on one bucket. All raise TierFault."""

    def __init__(self, bucket: Bucket, reader: Reader, writer: Writer, settings: S3Settings) -> None:
        self._bucket = bucket
        self._reader = reader
        self._writer = writer
        self._settings = settings

    def list(self, namespace: bytes | None, until: float) -> Iterator[Found]:
        """The objects of one namespace, or of all."""
        listed = (
            (entry, key)
            for entry in self._bucket.list(namespace_prefix(self._settings.prefix, namespace))
            if (key := key_of(self._settings.prefix, entry.name)) is not None
        )
        while batch := list(islice(listed, _BATCH)):
            # Only small objects can be packs; others hold what their names say.
            small = [entry.name for entry, _ in batch if entry.size <= OBJECT_BYTES_MAX]
            peeks = dict(zip(small, self._reader.peek(small, until), strict=True))
            for entry, key in batch:
                keys: tuple[ChunkKey, ...] = (key,)
                if entry.name in peeks:
                    peek = peeks[entry.name]
                    if peek is None:
                        continue  # It went meanwhile.
                    try:
                        keys = tuple(spans_of(peek, key))
                    except KVStoreError:
                        keys = ()
                yield Found(entry.name, keys, entry.size, entry.modified)

    def clear(self, namespace: bytes | None, tenant: str | None, until: float) -> Removed:
        """Remove the chunks of that namespace and tenant (None: of any). A tenant's are found by their metadata."""
        chunks = num_bytes = 0
        found = self.list(namespace, until)
        while batch := list(islice(found, _BATCH)):
            if tenant is not None:
                owners = self._reader.pool.map(self._owner, [entry.name for entry in batch])
                digest = tenant_digest(tenant)
                batch = [entry for entry, owner in zip(batch, owners, strict=True) if owner == digest]
            self._bucket.delete([entry.name for entry in batch])
            chunks += sum(len(entry.keys) for entry in batch)
            num_bytes += sum(entry.size for entry in batch)
        return Removed(chunks, num_bytes)

    def remove_chunk(self, name: str, key: ChunkKey, until: float) -> Removed:
        """Remove one chunk from an object; the others of a pack stay, in an object named by the first of them."""
        (peek,) = self._reader.peek([name], until)
        if peek is None:
            return Removed()
        named_by = key_of(self._settings.prefix, name)
        assert named_by is not None, name
        try:
            spans = spans_of(peek, named_by)
        except KVStoreError:
            spans = {key: None} if named_by == key else {}
        if key not in spans:
            return Removed()
        rest = {other: span for other, span in spans.items() if other != key and span is not None}
        if rest:
            data = self._reader.read(name, None, until)
            owner = self._owner(name)
            entries = [
                Entry(other, bytearray(data[span.offset : span.offset + span.length]), tenant=owner)
                for other, span in rest.items()
            ]
            if object_name(self._settings.prefix, entries[0].key) == name:
                self._writer.mark_bad(name)  # Has it overwritten.
                self._writer.store(entries, until)
                return Removed(1, peek.size)
            self._writer.store(entries, until)
        self._bucket.delete([name])
        return Removed(1, peek.size)

    def sweep(self, before: datetime) -> int:
        """Abort multipart uploads begun before then, whose writers died; how many."""
        stale = [
            upload for upload in self._bucket.unfinished(namespace_prefix(self._settings.prefix)) if upload[2] < before
        ]
        for name, upload, _ in stale:
            self._bucket.abort_parts(name, upload)
        return len(stale)

    def _owner(self, name: str) -> str:
        """The digest of the tenant that an object belongs to, or ""."""
        try:
            return self._bucket.head(name)[1].get(TENANT, "")
        except Missing:
            return ""
