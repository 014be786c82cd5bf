"""The frame that every message of the node server's protocol travels in, little-endian.

    offset  size  field
         0     2  magic "PK"
         2     1  version
         3     1  kind: a request's operation or a reply's answer
         4     4  length of the fields
         8     8  request id; a reply has its request's, what answers no request has 0
        16     8  length of the payload
        24     -  fields, then payload

Requests may be sent before earlier ones are answered; answers come in the order of the requests. A frame is judged by
its first 24 bytes, before room is made for the rest. Must not do I/O.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from paceline_kvstore.errors import KVStoreError

MAGIC = b"PK"
VERSION = 1

_HEAD = struct.Struct("<2sBBIQQ")
HEAD_BYTES = _HEAD.size
HELLO_BYTES_MAX = 4096
"""Fields of a first frame: what a stranger may make the server read."""
FIELD_BYTES_MAX = 512
"""Fields of a message beside its list of keys."""


class ProtocolError(KVStoreError):
    """The peer sent what the protocol doesn't allow; the message says what. The connection can't go on."""


class Head(NamedTuple):
    """The first HEAD_BYTES of a frame."""

    kind: int
    request_id: int
    field_bytes: int
    payload_bytes: int

    def to_bytes(self) -> bytes:
        return encode_head(self.kind, self.request_id, self.field_bytes, self.payload_bytes)


def encode_head(kind: int, request_id: int, field_bytes: int, payload_bytes: int) -> bytes:
    return _HEAD.pack(MAGIC, VERSION, kind, field_bytes, request_id, payload_bytes)


def decode_head(buffer: bytes | bytearray | memoryview, field_bytes_max: int, payload_bytes_max: int) -> Head:
    """The head in the first HEAD_BYTES of `buffer`. Raises ProtocolError if it is none, or promises too much."""
    if len(buffer) < HEAD_BYTES:
        raise ProtocolError(f"a frame begins with {HEAD_BYTES} bytes, this one has {len(buffer)}")
    magic, version, kind, field_bytes, request_id, payload_bytes = _HEAD.unpack_from(buffer)
    if magic != MAGIC:
        raise ProtocolError("the frame's magic number is wrong: this is another protocol")
    if version != VERSION:
        raise ProtocolError(f"the frame has protocol version {version}, this side speaks {VERSION}")
    if field_bytes > field_bytes_max:
        raise ProtocolError(f"the frame has {field_bytes} bytes of fields, the limit is {field_bytes_max}")
    if payload_bytes > payload_bytes_max:
        raise ProtocolError(f"the frame has a payload of {payload_bytes} bytes, the limit is {payload_bytes_max}")
    return Head(kind, request_id, field_bytes, payload_bytes)
