"""Packs: several small chunks of one chain in one object, with an index in front, little-endian.

    offset  size  field
         0     8  magic "PCLKVPAK"
         8     2  version
        10     2  number of chunks, 1 to MAX_CHUNKS
        12     4  zero
        16  88 n  key (ChunkKey.to_bytes), offset and length of the chunk in the object
    16+88n    16  XXH3-128 over what is before

A pack is named as its first chunk, so that whoever looks a chain up from its start finds it without a listing; the
first PEEK_BYTES of an object say whether it is a chunk or a pack, and hold the whole index. The chunks are as the codec
made them: one ranged read gets one, and it proves itself. Must not do I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from paceline_kvstore import codec
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import CorruptChunk, UnsupportedVersion
from paceline_kvstore.keys import KEY_BYTES, ChunkKey

MAGIC = b"PCLKVPAK"
VERSION = 1
MAX_CHUNKS = 40
PEEK_BYTES = 4096
CHUNKS_BYTES_MAX = 16 << 20
"""Bound on the chunks of one pack together."""

_HEAD = struct.Struct("<8sHHI")
_SPAN = struct.Struct("<QQ")
_ENTRY_BYTES = KEY_BYTES + _SPAN.size
_CHECKSUM_BYTES = 16
# Payloads stay as aligned in a pack as in an object of their own.
_ALIGNMENT = codec.HEADER_BYTES

OBJECT_BYTES_MAX = CHUNKS_BYTES_MAX + PEEK_BYTES + MAX_CHUNKS * _ALIGNMENT
"""No pack is larger."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a chunk lies in its object, header included. In bytes."""

    offset: int
    length: int


def build(chunks: Sequence[tuple[ChunkKey, Buffer]]) -> bytearray:
    """A pack of encoded chunks, in their order. ValueError if there are none or too many."""
    if not 1 <= len(chunks) <= MAX_CHUNKS:
        raise ValueError(f"a pack holds 1 to {MAX_CHUNKS} chunks, not {len(chunks)}")
    spans: list[Span] = []
    end = _index_bytes(len(chunks))
    for _, chunk in chunks:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        spans.append(Span(begin, memoryview(chunk).nbytes))
        end = begin + spans[-1].length
    pack = bytearray(end)
    entries = (
        key.to_bytes() + _SPAN.pack(span.offset, span.length) for (key, _), span in zip(chunks, spans, strict=True)
    )
    index = _HEAD.pack(MAGIC, VERSION, len(chunks), 0) + b"".join(entries)
    pack[: len(index)] = index
    pack[len(index) : len(index) + _CHECKSUM_BYTES] = xxhash.xxh3_128_digest(index)
    for (_, chunk), span in zip(chunks, spans, strict=True):
        pack[span.offset : span.offset + span.length] = chunk
    return pack


def is_pack(head: Buffer) -> bool:
    """Whether an object that begins so is a pack."""
    return bytes(memoryview(head)[: len(MAGIC)]) == MAGIC


def read_index(head: Buffer, size: int) -> dict[ChunkKey, Span]:
    """The chunks of a pack by the first PEEK_BYTES of it and its size in bytes, in order; each lies within the pack.

    Raises CorruptChunk or UnsupportedVersion.
    """
    view = memoryview(head)
    if len(view) < _HEAD.size or not is_pack(view):
        raise CorruptChunk("the magic number is wrong: these bytes are not a pack")
    _, version, count, _ = _HEAD.unpack_from(view)
    if version != VERSION:
        raise UnsupportedVersion(f"the pack has format version {version}, this reader knows {VERSION}")
    end = _index_bytes(count)
    if not 1 <= count <= MAX_CHUNKS or len(view) < end:
        raise CorruptChunk(f"a pack's index of {count} chunks does not fit into {len(view)} bytes")
    if bytes(view[end - _CHECKSUM_BYTES : end]) != xxhash.xxh3_128_digest(view[: end - _CHECKSUM_BYTES]):
        raise CorruptChunk("the checksum of the pack's index does not match")
    spans: dict[ChunkKey, Span] = {}
    for begin in range(_HEAD.size, end - _CHECKSUM_BYTES, _ENTRY_BYTES):
        try:
            key = ChunkKey.from_bytes(view[begin : begin + KEY_BYTES])
        except ValueError as error:
            raise CorruptChunk(str(error)) from None
        span = Span(*_SPAN.unpack_from(view, begin + KEY_BYTES))
        # Readers make room for what a span promises; anybody can write an index whose checksum is right.
        if span.offset + span.length > size:
            raise CorruptChunk(f"a chunk of the pack ends at {span.offset + span.length}, the object at {size}")
        spans[key] = span
    return spans


def _index_bytes(count: int) -> int:
    return _HEAD.size + count * _ENTRY_BYTES + _CHECKSUM_BYTES


assert _index_bytes(MAX_CHUNKS) <= PEEK_BYTES
