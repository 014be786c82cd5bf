"""Uploads: one object for a chunk or a run of small ones, conditional where the server knows that, large in parts.

Names say what is in an object, so whoever comes second has nothing to add: "exists" is success once the beginning of
what exists shows the chunk. Only an object that failed a check is overwritten.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from paceline_kvstore import codec
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import CorruptChunk, ForeignChunk, KVStoreError, TierFault
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.s3 import pack
from paceline_kvstore.s3.client import Bucket, Exists, Missing, is_unsupported
from paceline_kvstore.s3.counts import Counts
from paceline_kvstore.s3.names import namespace_prefix, object_name
from paceline_kvstore.s3.pack import Span
from paceline_kvstore.s3.places import Places
from paceline_kvstore.s3.queue import Entry
from paceline_kvstore.s3.reader import Peek, Reader
from paceline_kvstore.s3.settings import MAX_PARTS, S3Settings

TENANT = "paceline-tenant"
_BAD_NAMES_MAX = 4096
_ROUNDS = 3


class Writer:
    """The write pool of one bucket. Safe to call from several threads."""

    def __init__(self, bucket: Bucket, reader: Reader, places: Places, settings: S3Settings, counts: Counts) -> None:
        self.bucket = bucket
        self._reader = reader
        self._places = places
        self._settings = settings
        self._counts = counts
        self._parts = ThreadPoolExecutor(settings.write_workers, thread_name_prefix="kv-s3-part")
        self._knows_conditions: bool | None = None
        self._probing = Lock()
        self._bad: OrderedDict[str, None] = OrderedDict()
        self._bad_lock = Lock()

    def store(self, run: Sequence[Entry], until: float) -> None:
        """Make a run of chunks durable: the first names the object. `until` bounds looking at what exists.

        Raises TierFault if one may not be durable.
        """
        rest = list(run)
        for _ in range(len(run) + _ROUNDS):
            if not rest:
                return
            rest = self._store_ahead(rest, until)
        raise TierFault("S3 says that an object exists and that it does not")

    def mark_bad(self, name: str) -> None:
        """Have the next upload of that name overwrite what is there."""
        with self._bad_lock:
            self._bad[name] = None
            if len(self._bad) > _BAD_NAMES_MAX:
                self._bad.popitem(last=False)

    def close(self) -> None:
        self._parts.shutdown(wait=False, cancel_futures=True)
        self.bucket.close()

    def _store_ahead(self, run: list[Entry], until: float) -> list[Entry]:
        """Upload the run, or what of it the object of that name lacks; the entries that remain to be stored."""
        first = run[0]
        name = object_name(self._settings.prefix, first.key)
        body: Buffer = first.chunk if len(run) == 1 else pack.build([(entry.key, entry.chunk) for entry in run])
        metadata = {TENANT: first.tenant} if first.tenant else {}
        with self._bad_lock:
            is_bad = name in self._bad
        try:
            self._upload(name, body, metadata, overwrite=is_bad)
        except Exists:
            return self._after_existing(name, run, until)
        with self._bad_lock:
            self._bad.pop(name, None)
        size = memoryview(body).nbytes
        spans = {first.key: Span(0, size)} if len(run) == 1 else pack.read_index(body, size)
        self._places.add(name, spans)
        self._counts.add(puts=len(run), bytes_written=size)
        return []

    def _after_existing(self, name: str, run: list[Entry], until: float) -> list[Entry]:
        """What is there may be a shorter run, or bad: the entries that it lacks."""
        (peek,) = self._reader.peek([name], until)
        if peek is None:
            return run  # It went meanwhile: try again.
        try:
            spans = spans_of(peek, run[0].key)
        except KVStoreError:
            self.mark_bad(name)
            return run
        self._places.add(name, spans)
        rest = [entry for entry in run if entry.key not in spans]
        self._counts.add(puts=len(run) - len(rest), existing=len(run) - len(rest))
        return rest

    def _upload(self, name: str, body: Buffer, metadata: Mapping[str, str], *, overwrite: bool) -> None:
        conditional = not overwrite
        if conditional and not self._probed():
            conditional = False
            try:
                self.bucket.head(name)
            except Missing:
                pass
            else:
                raise Exists(name)
        if memoryview(body).nbytes > self._settings.multipart_bytes:
            self._upload_parts(name, body, metadata, conditional=conditional)
        else:
            self.bucket.put(name, body, metadata, conditional=conditional)

    def _upload_parts(self, name: str, body: Buffer, metadata: Mapping[str, str], *, conditional: bool) -> None:
        view = memoryview(body).cast("B")
        step = max(self._settings.part_bytes, -(-len(view) // MAX_PARTS))
        upload = self.bucket.begin_parts(name, metadata)
        parts: list[Future[str]] = []
        try:
            for number, begin in enumerate(range(0, len(view), step), 1):
                part = bytes(view[begin : begin + step])
                parts.append(self._parts.submit(self.bucket.put_part, name, upload, number, part))
            self.bucket.end_parts(name, upload, [part.result() for part in parts], conditional=conditional)
        except BaseException:
            for part in parts:
                part.cancel()
            # Parts still on their way would outlive the abort.
            for part in parts:
                if not part.cancelled():
                    part.exception()
            self._abort(name, upload)
            raise

    def _abort(self, name: str, upload: str) -> None:
        try:
            self.bucket.abort_parts(name, upload)
        except TierFault as fault:
            self._counts.add_fault(fault)  # The lifecycle rule, or the next start, cleans up.

    def _probed(self) -> bool:
        """Whether the server refuses a conditional put of what exists; asked once, by trying it."""
        with self._probing:
            if self._knows_conditions is None:
                name = f"{namespace_prefix(self._settings.prefix)}probe/{secrets.token_hex(16)}"
                self._knows_conditions = self._probe(name)
            return self._knows_conditions

    def _probe(self, name: str) -> bool:
        try:
            self.bucket.put(name, b"", {}, conditional=True)
        except TierFault as fault:
            if is_unsupported(fault):
                return False
            raise
        try:
            self.bucket.put(name, b"", {}, conditional=True)
        except Exists:
            return True
        finally:
            self.bucket.delete([name])
        return False


def spans_of(peek: Peek, key: ChunkKey) -> dict[ChunkKey, Span]:
    """What is in an object that is named by `key`. Raises CorruptChunk, ForeignChunk or UnsupportedVersion."""
    if pack.is_pack(peek.head):
        spans = pack.read_index(peek.head, peek.size)
        if key not in spans:
            raise CorruptChunk("the pack lacks the chunk that names it")
        return spans
    found, payload_bytes = codec.read_header(peek.head[: codec.HEADER_BYTES])
    if found != key:
        raise ForeignChunk(f"the chunk is {found}, asked for was {key}")
    if codec.encoded_size(payload_bytes) != peek.size:
        raise CorruptChunk(f"the header promises {payload_bytes} bytes, the object has {peek.size}")
    return {key: Span(0, peek.size)}
