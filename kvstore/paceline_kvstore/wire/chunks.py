"""A chunk's bytes on the wire: payload, then header, checked while they come."""

from __future__ import annotations

from paceline_kvstore import codec
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.wire.transport import Inbox


def receive_chunk(inbox: Inbox, key: ChunkKey, target: memoryview, deadline: float) -> bytes:
    """Payload into `target`, which is flat and as long; the verified header.

    All of it was read when it raises CorruptChunk, ForeignChunk or UnsupportedVersion, so that the stream can go on.
    Raises OSError as well.
    """
    checksum = codec.Checksum(key, len(target))
    inbox.read_into(target, deadline, checksum.add)
    header = inbox.read(codec.HEADER_BYTES, deadline)
    if header != checksum.header():
        codec.check(header, target, key)  # Says what is wrong.
    return header
