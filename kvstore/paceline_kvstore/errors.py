"""What can be wrong with a chunk. To a reader each of these is a miss: drop the chunk, count it, recompute."""

from __future__ import annotations


class KVStoreError(Exception):
    """Root of the package's errors."""


class CorruptChunk(KVStoreError):
    """The bytes are not what was written: wrong magic, length or checksum."""


class ForeignChunk(KVStoreError):
    """An intact chunk that belongs to another key than the one asked for."""


class UnsupportedVersion(KVStoreError):
    """The chunk names a format version that this reader does not know."""
