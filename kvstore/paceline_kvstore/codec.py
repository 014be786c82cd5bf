"""The chunk format: a fixed header in front of the payload, little-endian, checked at every hop.

    offset  size  field
         0     8  magic "PCLKVCHK"
         8     2  version
        10     2  header size, where the payload starts
        12     4  zero
        16     8  payload length in bytes
        24    72  key (ChunkKey.to_bytes)
        96    16  zero
       112    16  XXH3-128 over bytes 0..112 and the payload

The header is two cache lines, so a payload is as aligned as its buffer. The checksum finds accidents; it stops no
forger. Must not do I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

from paceline_kvstore.errors import CorruptChunk, ForeignChunk, UnsupportedVersion
from paceline_kvstore.keys import KEY_BYTES, ChunkKey

MAGIC = b"PCLKVCHK"
VERSION = 1
HEADER_BYTES = 128

_PREFIX = struct.Struct("<8sHHIQ")
_KEY_END = _PREFIX.size + KEY_BYTES
_CHECKSUM_START = 112
_PADDING = bytes(_CHECKSUM_START - _KEY_END)

Buffer = bytes | bytearray | memoryview
"""Contiguous memory; a memoryview may have any element type."""


def encoded_size(payload_bytes: int) -> int:
    """Bytes of a chunk with a payload of that many bytes."""
    return HEADER_BYTES + payload_bytes


def encode(key: ChunkKey, payload: Buffer) -> bytearray:
    """Header and payload in one new buffer."""
    source = as_bytes(payload)
    target = bytearray(encoded_size(len(source)))
    encode_into(target, key, source)
    return target


def encode_into(target: bytearray | memoryview, key: ChunkKey, payload: Buffer) -> int:
    """Write header and payload to the front of `target`; the bytes written. ValueError if it is too small."""
    source = as_bytes(payload)
    view = as_bytes(target)
    size = encoded_size(len(source))
    if len(view) < size:
        raise ValueError(f"the chunk needs {size} bytes, the buffer has {len(view)}")
    view[HEADER_BYTES:size] = source
    view[:HEADER_BYTES] = encode_header(key, source)
    return size


def encode_header(key: ChunkKey, payload: Buffer) -> bytes:
    """The header alone, HEADER_BYTES long, for a payload that stays in a buffer of its own."""
    source = as_bytes(payload)
    fields = _PREFIX.pack(MAGIC, VERSION, HEADER_BYTES, 0, len(source)) + key.to_bytes() + _PADDING
    return fields + _checksum(fields, (source,))


class Checksum:
    """A header that is made while the payload passes by, piece by piece in order."""

    def __init__(self, key: ChunkKey, payload_bytes: int) -> None:
        self._fields = _PREFIX.pack(MAGIC, VERSION, HEADER_BYTES, 0, payload_bytes) + key.to_bytes() + _PADDING
        self._digest = xxhash.xxh3_128(self._fields)
        self.add = self._digest.update

    def header(self) -> bytes:
        """The header of a chunk of which all pieces were added."""
        return self._fields + self._digest.digest()


def decode(buffer: Buffer, key: ChunkKey) -> memoryview:
    """The payload of `key`'s chunk: a read-only view into `buffer`, no copy.

    Raises CorruptChunk, UnsupportedVersion, or ForeignChunk for an intact chunk of another key.
    """
    view = as_bytes(buffer)
    payload = view[HEADER_BYTES:].toreadonly()
    check(view[:HEADER_BYTES], payload, key)
    return payload


def check(header: Buffer, payload: Buffer, key: ChunkKey) -> None:
    """`decode` for a header and a payload in two buffers, same errors."""
    view = as_bytes(payload)
    check_parts(header, len(view), (view,), key)


def check_parts(header: Buffer, payload_bytes: int, parts: Iterable[Buffer], key: ChunkKey) -> None:
    """`check` for a payload that comes in parts, in order; they are taken from the iterator one at a time."""
    found = _verified_key(as_bytes(header), payload_bytes, parts)
    if found != key:
        raise ForeignChunk(f"the chunk is {found}, asked for was {key}")


def read_key(buffer: Buffer) -> ChunkKey:
    """The key of a chunk whose key is not known yet, as in a scan. Raises CorruptChunk or UnsupportedVersion."""
    view = as_bytes(buffer)
    payload = view[HEADER_BYTES:]
    return _verified_key(view[:HEADER_BYTES], len(payload), (payload,))


def read_header(header: Buffer) -> tuple[ChunkKey, int]:
    """Key and payload length that a header names, before the checksum is known to be right.

    Raises CorruptChunk or UnsupportedVersion.
    """
    view = as_bytes(header)
    if len(view) < HEADER_BYTES:
        raise CorruptChunk(f"{len(view)} bytes are too few for a header of {HEADER_BYTES}")
    magic, version, header_bytes, _, payload_bytes = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise CorruptChunk("the magic number is wrong: these bytes are not a chunk")
    if version != VERSION:
        raise UnsupportedVersion(f"the chunk has format version {version}, this reader knows {VERSION}")
    if header_bytes != HEADER_BYTES:
        raise CorruptChunk(f"the header says that it has {header_bytes} bytes, it has {HEADER_BYTES}")
    try:
        return ChunkKey.from_bytes(view[_PREFIX.size : _KEY_END]), payload_bytes
    except ValueError as error:
        raise CorruptChunk(str(error)) from None


def as_bytes(buffer: Buffer) -> memoryview:
    """The buffer as flat bytes, no copy. ValueError if it is strided."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous: copy it first")
    return view.cast("B")


def _checksum(fields: bytes | memoryview, parts: Iterable[Buffer]) -> bytes:
    digest = xxhash.xxh3_128(fields)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _verified_key(header: memoryview, payload_bytes: int, parts: Iterable[Buffer]) -> ChunkKey:
    """The key that the header names, after everything else was checked."""
    key, promised = read_header(header)
    if promised != payload_bytes:
        raise CorruptChunk(
            f"the header promises {HEADER_BYTES} + {promised} bytes, the buffer has {len(header) + payload_bytes}"
        )
    if bytes(header[_CHECKSUM_START:]) != _checksum(header[:_CHECKSUM_START], parts):
        raise CorruptChunk("the checksum does not match")
    return key
