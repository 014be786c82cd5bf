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
    source = _as_bytes(payload)
    target = bytearray(encoded_size(len(source)))
    encode_into(target, key, source)
    return target


def encode_into(target: bytearray | memoryview, key: ChunkKey, payload: Buffer) -> int:
    """Write header and payload to the front of `target`; the bytes written. ValueError if it is too small."""
    source = _as_bytes(payload)
    view = _as_bytes(target)
    size = encoded_size(len(source))
    if len(view) < size:
        raise ValueError(f"the chunk needs {size} bytes, the buffer has {len(view)}")
    view[: _PREFIX.size] = _PREFIX.pack(MAGIC, VERSION, HEADER_BYTES, 0, len(source))
    view[_PREFIX.size : _KEY_END] = key.to_bytes()
    view[_KEY_END:_CHECKSUM_START] = _PADDING
    view[HEADER_BYTES:size] = source
    view[_CHECKSUM_START:HEADER_BYTES] = _checksum(view[:size])
    return size


def decode(buffer: Buffer, key: ChunkKey) -> memoryview:
    """The payload of `key`'s chunk: a read-only view into `buffer`, no copy.

    Raises CorruptChunk, UnsupportedVersion, or ForeignChunk for an intact chunk of another key.
    """
    view = _verified(buffer)
    found = _key_of(view)
    if found != key:
        raise ForeignChunk(f"the chunk is {found}, asked for was {key}")
    return view[HEADER_BYTES:].toreadonly()


def read_key(buffer: Buffer) -> ChunkKey:
    """The key of a chunk whose key is not known yet, as in a scan. Raises CorruptChunk or UnsupportedVersion."""
    return _key_of(_verified(buffer))


def _as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous: copy it first")
    return view.cast("B")


def _checksum(chunk: memoryview) -> bytes:
    digest = xxhash.xxh3_128(chunk[:_CHECKSUM_START])
    digest.update(chunk[HEADER_BYTES:])
    return digest.digest()


def _verified(buffer: Buffer) -> memoryview:
    """The chunk as bytes, after everything but its key was checked."""
    view = _as_bytes(buffer)
    if len(view) < HEADER_BYTES:
        raise CorruptChunk(f"{len(view)} bytes are too few for a header of {HEADER_BYTES}")
    magic, version, header_bytes, _, payload_bytes = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise CorruptChunk("the magic number is wrong: these bytes are not a chunk")
    if version != VERSION:
        raise UnsupportedVersion(f"the chunk has format version {version}, this reader knows {VERSION}")
    if header_bytes != HEADER_BYTES or encoded_size(payload_bytes) != len(view):
        raise CorruptChunk(f"the header promises {header_bytes} + {payload_bytes} bytes, the buffer has {len(view)}")
    if bytes(view[_CHECKSUM_START:HEADER_BYTES]) != _checksum(view):
        raise CorruptChunk("the checksum does not match")
    return view


def _key_of(chunk: memoryview) -> ChunkKey:
    try:
        return ChunkKey.from_bytes(chunk[_PREFIX.size : _KEY_END])
    except ValueError as error:
        raise CorruptChunk(str(error)) from None
