"""The disk format: segments of records, all on 4 KiB blocks, little-endian. Must not do I/O.

    segment    one header block, then records back to back
    record     one header block, then the payload, padded with zeros to whole blocks

    segment header                        record header
    0   8  magic "PCLKVSEG"               0    8  magic "PCLKVREC"
    8   2  version                        8    4  flags: 1 = dead
    10  6  zero                           12   4  zero
    16  8  segment number                 16   8  nonce of the segment
    24  8  nonce                          24   8  offset of this block in the file
    32  8  XXH3-64 over bytes 0..32       32   8  when it was stored, milliseconds since 1970
                                          40   8  payload length in bytes
                                          48  16  digest of the tenant, zeros for none
                                          64  72  key of the chunk before it in its chain, zeros for none
                                          136 128 chunk header (paceline_kvstore.codec)
                                          264 16  XXH3-128 over bytes 0..264

A record's header says where it belongs, so that neither a stale block nor a payload that looks like a record is ever
taken for one. Its checksum covers the header alone: a scan need not read payloads. The chunk header's covers payload
and key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import xxhash

from paceline_kvstore.codec import HEADER_BYTES
from paceline_kvstore.errors import CorruptChunk, UnsupportedVersion
from paceline_kvstore.keys import KEY_BYTES

BLOCK = 4096
VERSION = 1
PAYLOAD_MAX = 2**30
TENANT_BYTES = 16
NO_TENANT = bytes(TENANT_BYTES)
NO_PARENT = bytes(KEY_BYTES)

_SEGMENT_MAGIC = b"PCLKVSEG"
_SEGMENT = struct.Struct("<8sH6xQQ")
_RECORD_MAGIC = b"PCLKVREC"
_RECORD = struct.Struct(f"<8sI4xQQQQ{TENANT_BYTES}s{KEY_BYTES}s{HEADER_BYTES}s")
_CHECKSUM_BYTES = 16
_DEAD = 1
_KEY_START = 24  # of the key in the chunk header


def blocks(num_bytes: int) -> int:
    """Blocks that hold `num_bytes`."""
    return -(-num_bytes // BLOCK)


def record_bytes(payload_bytes: int) -> int:
    """Bytes of a record on disk: header block and padded payload."""
    return BLOCK * (1 + blocks(payload_bytes))


def tenant_digest(tenant: str) -> bytes:
    """What stands for a tenant on disk; names stay out of files."""
    if not tenant:
        return NO_TENANT
    return blake2b(tenant.encode(), digest_size=TENANT_BYTES, person=b"paceline-tenant").digest()


@dataclass(frozen=True, slots=True)
class Record:
    """A record's header. `chunk` is the chunk header, `parent` a key's wire form, `stored_ms` wall clock."""

    payload_bytes: int
    stored_ms: int = 0
    tenant: bytes = NO_TENANT
    parent: bytes = NO_PARENT
    chunk: bytes = bytes(HEADER_BYTES)
    dead: bool = False

    @property
    def key(self) -> bytes:
        """The key's wire form."""
        return self.chunk[_KEY_START : _KEY_START + KEY_BYTES]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return record_bytes(self.payload_bytes)


def encode_record(record: Record, nonce: int, offset: int) -> bytes:
    """The used part of a header block; the rest of the block is zeros."""
    fields = _RECORD.pack(
        _RECORD_MAGIC,
        _DEAD if record.dead else 0,
        nonce,
        offset,
        record.stored_ms,
        record.payload_bytes,
        record.tenant,
        record.parent,
        record.chunk,
    )
    return fields + xxhash.xxh3_128_digest(fields)


RECORD_START = np.r_[0:8, 16:24]
"""Bytes of a header that are the same in all records of a segment: magic and nonce."""
RECORD_START_BYTES = 24


def record_start(nonce: int) -> bytes:
    """The first RECORD_START_BYTES of a header in the segment with that nonce; only those of RECORD_START count."""
    return _RECORD_MAGIC + bytes(8) + struct.pack("<Q", nonce)


def decode_record(block: bytes | memoryview, nonce: int, offset: int) -> Record:
    """The header in a block that was read at `offset` of the segment with that nonce. Raises CorruptChunk."""
    fields, checksum = bytes(block[: _RECORD.size]), bytes(block[_RECORD.size : _RECORD.size + _CHECKSUM_BYTES])
    if not fields.startswith(_RECORD_MAGIC) or len(checksum) < _CHECKSUM_BYTES:
        raise CorruptChunk("these bytes are not a record")
    if xxhash.xxh3_128_digest(fields) != checksum:
        raise CorruptChunk("the checksum of the record's header does not match")
    _, flags, at_nonce, at_offset, stored_ms, payload_bytes, tenant, parent, chunk = _RECORD.unpack(fields)
    if (at_nonce, at_offset) != (nonce, offset):
        raise CorruptChunk(f"the record belongs to offset {at_offset} of another place")
    if payload_bytes > PAYLOAD_MAX:
        raise CorruptChunk(f"the record promises {payload_bytes} bytes, more than any may have")
    return Record(payload_bytes, stored_ms, tenant, parent, chunk, bool(flags & _DEAD))


def encode_segment(number: int, nonce: int) -> bytes:
    """A segment's header block."""
    fields = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, number, nonce)
    return (fields + xxhash.xxh3_64_digest(fields)).ljust(BLOCK, b"\0")


def decode_segment(block: bytes | memoryview, number: int) -> int:
    """The nonce of segment `number`. Raises CorruptChunk or UnsupportedVersion."""
    fields, checksum = bytes(block[: _SEGMENT.size]), bytes(block[_SEGMENT.size : _SEGMENT.size + 8])
    if not fields.startswith(_SEGMENT_MAGIC) or xxhash.xxh3_64_digest(fields) != checksum:
        raise CorruptChunk("these bytes are not a segment's header")
    _, version, at_number, nonce = _SEGMENT.unpack(fields)
    if version != VERSION:
        raise UnsupportedVersion(f"the segment has format version {version}, this reader knows {VERSION}")
    if at_number != number:
        raise CorruptChunk(f"the header is that of segment {at_number}")
    return nonce
