"""What can be wrong with a chunk or a folder. To a reader a bad chunk is a miss: drop it, count it, recompute."""

from __future__ import annotations


class KVStoreError(Exception):
    """Root of the package's errors."""


class CorruptChunk(KVStoreError):
    """The bytes are not what was written: wrong magic, length or checksum."""


class ForeignChunk(KVStoreError):
    """An intact chunk that belongs to another key than the one asked for."""


class UnsupportedVersion(KVStoreError):
    """The chunk names a format version that this reader does not know."""


class FolderUnusable(KVStoreError):
    """A tier cannot open its folder: it is in use, or the file system says no."""
