"""What an engine asks of the node server and what that answers, as data. Must not do I/O.

The first request is `Hello`. The payload of a `Put` and of a hit is a chunk as `codec` writes it, so that the checksum
made by the writer is compared by every reader; but the header comes last, so that the checksum is made while the bytes
are on their way.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from enum import IntEnum

from paceline_kvstore.keys import DIGEST_BYTES, KEY_BYTES, ChunkKey
from paceline_kvstore.stats import TierStats
from paceline_kvstore.wire.fields import FieldReader, keys_field, number_field, text_field
from paceline_kvstore.wire.frames import FIELD_BYTES_MAX, HELLO_BYTES_MAX, ProtocolError, encode_head

KEYS_MAX = 4096
"""Keys in one message; a longer list goes in several."""
TENANT_BYTES_MAX = 256
TOKEN_BYTES_MAX = 2048
HOLDER_BYTES_MAX = 128
"""A pin's holder: as a rule a request's or a transfer's id."""
MESSAGE_BYTES_MAX = 1024
MESSAGE_FIELD_BYTES_MAX = FIELD_BYTES_MAX + KEYS_MAX * KEY_BYTES


class Op(IntEnum):
    """Kinds of requests."""

    HELLO = 1
    GET = 2
    PUT = 3
    CONTAINS = 4
    DELETE = 5
    CLEAR = 6
    KEYS = 7
    STATS = 8
    FLUSH = 9
    PIN = 10
    UNPIN = 11
    EXTEND = 12


class Answer(IntEnum):
    """Kinds of replies."""

    WELCOME = 128
    HIT = 129
    MISS = 130
    TOO_LARGE = 131
    COUNT = 132
    KEYS = 133
    STATS = 134
    FAIL = 135


class Reason(IntEnum):
    """Why the server says FAIL. After all but INTERNAL it closes the connection."""

    BAD_FRAME = 1
    UNAUTHORIZED = 2
    DRAINING = 3
    FULL = 4
    SLOW = 5
    INTERNAL = 6


@dataclass(frozen=True, slots=True)
class Hello:
    """Who asks: whoever has the token."""

    token: str = ""


@dataclass(frozen=True, slots=True)
class Get:
    """Send a chunk, if its payload has at most `capacity` bytes. The client waits for so many milliseconds.

    parent, tenant: what the chunk was put with, for copies that the server makes of it; without a tenant it makes none
    of a chunk whose owner it doesn't know.
    """

    key: ChunkKey
    capacity: int
    milliseconds: int
    parent: ChunkKey | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """Keep the chunk in the frame's payload. Answered by COUNT: 1 kept, 0 not kept."""

    key: ChunkKey
    parent: ChunkKey | None = None
    tenant: str = ""
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Contains:
    """How many leading keys are there. The client waits for so many milliseconds."""

    keys: tuple[ChunkKey, ...]
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Delete:
    key: ChunkKey


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget the chunks of that namespace and tenant; None: of any."""

    namespace: bytes | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """The next page of this connection's listing of keys, or the first of a new one."""

    restart: bool


@dataclass(frozen=True, slots=True)
class Stats:
    pass


@dataclass(frozen=True, slots=True)
class Flush:
    pass


@dataclass(frozen=True, slots=True)
class Pin:
    """Hold these for `milliseconds` instead of what the holder held; how many leading ones are there and held.

    The server may hold them for less. Whoever knows the holder's name may prolong or end it, over any connection.
    """

    holder: str
    keys: tuple[ChunkKey, ...]
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let go of what the holder holds: 1, or 0 if that had ended."""

    holder: str


@dataclass(frozen=True, slots=True)
class Extend:
    """Hold what the holder holds for `milliseconds` from now: 1, or 0 if that had ended."""

    holder: str
    milliseconds: int


Request = Hello | Get | Put | Contains | Delete | Clear | Keys | Stats | Flush | Pin | Unpin | Extend

_OPS: dict[type[Request], Op] = {
    Hello: Op.HELLO, Get: Op.GET, Put: Op.PUT, Contains: Op.CONTAINS, Delete: Op.DELETE, Clear: Op.CLEAR,
    Keys: Op.KEYS, Stats: Op.STATS, Flush: Op.FLUSH, Pin: Op.PIN, Unpin: Op.UNPIN,
    Extend: Op.EXTEND,
}  # fmt: skip


_OP_OF_KIND: dict[int, Op] = {op.value: op for op in Op}
_NAMES = {op: f"request {op.name.lower()}" for op in Op}


def op_of(request: Request) -> Op:
    return _OPS[type(request)]


def encode_request(request_id: int, request: Request, payload_bytes: int = 0) -> bytes:
    """Head and fields; a payload of that many bytes follows. ValueError if a field is longer than a frame takes."""
    body = _request_fields(request)
    limit = HELLO_BYTES_MAX if isinstance(request, Hello) else MESSAGE_FIELD_BYTES_MAX
    if len(body) > limit:
        raise ValueError(f"{type(request).__name__} has {len(body)} bytes of fields, a frame takes {limit}")
    return encode_head(op_of(request), request_id, len(body), payload_bytes) + body


def _request_fields(request: Request) -> bytes:
    match request:
        case Get(key, capacity, milliseconds, parent, tenant):
            numbers = key.to_bytes() + number_field(capacity) + number_field(milliseconds)
            flags = bytes([(parent is not None) | (tenant is not None) << 1])
            ends = (b"" if parent is None else parent.to_bytes()) + (b"" if tenant is None else text_field(tenant))
            return numbers + flags + ends
        case Hello(token):
            return text_field(token)
        case Put(key, parent, tenant, durable):
            flags = bytes([durable | (parent is not None) << 1])
            return key.to_bytes() + flags + text_field(tenant) + (b"" if parent is None else parent.to_bytes())
        case Contains(keys, milliseconds):
            return number_field(milliseconds) + keys_field(keys)
        case Delete(key):
            return key.to_bytes()
        case Clear(namespace, tenant):
            flags = bytes([(namespace is not None) | (tenant is not None) << 1])
            return flags + (namespace or b"") + (b"" if tenant is None else text_field(tenant))
        case Keys(restart):
            return bytes([restart])
        case Stats() | Flush():
            return b""
        case Pin(holder, keys, milliseconds):
            return text_field(holder) + number_field(milliseconds) + keys_field(keys)
        case Unpin(holder):
            return text_field(holder)
        case Extend(holder, milliseconds):
            return text_field(holder) + number_field(milliseconds)


def decode_request(kind: int, body: bytes) -> Request:
    """The request in a frame's fields. Raises ProtocolError that names the request and the field."""
    op = _OP_OF_KIND.get(kind)
    if op is None:
        raise ProtocolError(f"the frame's kind {kind} is no request of protocol version 1")
    reader = FieldReader(_NAMES[op], body)
    request = _read_request(op, reader)
    reader.end()
    return request


def _read_request(op: Op, reader: FieldReader) -> Request:
    match op:
        case Op.GET:
            key, capacity, milliseconds = reader.key("key"), reader.number("capacity"), reader.number("milliseconds")
            flags = reader.byte("flags", 3)
            parent = reader.key("parent") if flags & 1 else None
            return Get(key, capacity, milliseconds, parent, _tenant(reader) if flags & 2 else None)
        case Op.HELLO:
            return Hello(reader.text("token", TOKEN_BYTES_MAX))
        case Op.PUT:
            key, flags = reader.key("key"), reader.byte("flags", 3)
            tenant = _tenant(reader)
            return Put(key, reader.key("parent") if flags & 2 else None, tenant, bool(flags & 1))
        case Op.CONTAINS:
            milliseconds = reader.number("milliseconds")
            return Contains(reader.keys("keys", KEYS_MAX), milliseconds)
        case Op.DELETE:
            return Delete(reader.key("key"))
        case Op.CLEAR:
            flags = reader.byte("flags", 3)
            namespace = reader.raw("namespace", DIGEST_BYTES) if flags & 1 else None
            return Clear(namespace, _tenant(reader) if flags & 2 else None)
        case Op.KEYS:
            return Keys(bool(reader.byte("restart", 1)))
        case Op.STATS:
            return Stats()
        case Op.FLUSH:
            return Flush()
        case Op.PIN:
            holder, milliseconds = _holder(reader), reader.number("milliseconds")
            return Pin(holder, reader.keys("keys", KEYS_MAX), milliseconds)
        case Op.UNPIN:
            return Unpin(_holder(reader))
        case Op.EXTEND:
            return Extend(_holder(reader), reader.number("milliseconds"))


def _tenant(reader: FieldReader) -> str:
    return reader.text("tenant", TENANT_BYTES_MAX)


def _holder(reader: FieldReader) -> str:
    return reader.text("holder", HOLDER_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's limits. payload_bytes_max: of one chunk, header included."""

    capacity: int
    payload_bytes_max: int


@dataclass(frozen=True, slots=True)
class Hit:
    """The chunk is the frame's payload."""


@dataclass(frozen=True, slots=True)
class Miss:
    pass


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The payload has `size` bytes, more than was asked for."""

    size: int


@dataclass(frozen=True, slots=True)
class Count:
    number: int


@dataclass(frozen=True, slots=True)
class KeyPage:
    keys: tuple[ChunkKey, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class StatsReply:
    """The tier's counts and bytes, and what is pinned in it."""

    stats: TierStats
    bytes_used: int
    capacity: int
    pinned: int


@dataclass(frozen=True, slots=True)
class Fail:
    reason: Reason
    message: str


Reply = Welcome | Hit | Miss | TooLarge | Count | KeyPage | StatsReply | Fail

_ANSWERS: dict[type[Reply], Answer] = {
    Welcome: Answer.WELCOME, Hit: Answer.HIT, Miss: Answer.MISS, TooLarge: Answer.TOO_LARGE, Count: Answer.COUNT,
    KeyPage: Answer.KEYS, StatsReply: Answer.STATS, Fail: Answer.FAIL,
}  # fmt: skip


_ANSWER_OF_KIND: dict[int, Answer] = {answer.value: answer for answer in Answer}
_BARE: dict[int, Reply] = {Answer.HIT.value: Hit(), Answer.MISS.value: Miss()}
"""Replies without fields, made once."""


def encode_reply(request_id: int, reply: Reply, payload_bytes: int = 0) -> bytes:
    """Head and fields; a payload of that many bytes follows."""
    body = _reply_fields(reply)
    return encode_head(_ANSWERS[type(reply)], request_id, len(body), payload_bytes) + body


def _reply_fields(reply: Reply) -> bytes:
    match reply:
        case Welcome(capacity, payload_bytes_max):
            return number_field(capacity) + number_field(payload_bytes_max)
        case Hit() | Miss():
            return b""
        case TooLarge(number) | Count(number):
            return number_field(number)
        case KeyPage(keys, more):
            return bytes([more]) + keys_field(keys)
        case StatsReply(stats, bytes_used, capacity, pinned):
            return b"".join(map(number_field, (*astuple(stats), bytes_used, capacity, pinned)))
        case Fail(reason, message):
            return bytes([reason]) + text_field(message.encode()[:MESSAGE_BYTES_MAX].decode(errors="ignore"))


def decode_reply(kind: int, body: bytes) -> Reply:
    """The reply in a frame's fields. Raises ProtocolError that names the reply and the field."""
    if not body and kind in _BARE:
        return _BARE[kind]
    answer = _ANSWER_OF_KIND.get(kind)
    if answer is None:
        raise ProtocolError(f"the frame's kind {kind} is no reply of protocol version 1")
    reader = FieldReader(f"reply {answer.name.lower()}", body)
    reply = _read_reply(answer, reader)
    reader.end()
    return reply


def _read_reply(answer: Answer, reader: FieldReader) -> Reply:
    match answer:
        case Answer.WELCOME:
            return Welcome(reader.number("capacity"), reader.number("payload_bytes_max"))
        case Answer.HIT:
            return Hit()
        case Answer.MISS:
            return Miss()
        case Answer.TOO_LARGE:
            return TooLarge(reader.number("size"))
        case Answer.COUNT:
            return Count(reader.number("number"))
        case Answer.KEYS:
            more = bool(reader.byte("more", 1))
            return KeyPage(reader.keys("keys", KEYS_MAX), more)
        case Answer.STATS:
            stats = TierStats(*(reader.number(field.name) for field in fields(TierStats)))
            return StatsReply(stats, reader.number("bytes_used"), reader.number("capacity"), reader.number("pinned"))
        case Answer.FAIL:
            try:
                reason = Reason(reader.byte("reason", 255))
            except ValueError as error:
                raise ProtocolError(f"reply fail, reason: {error}") from None
            return Fail(reason, reader.text("message", MESSAGE_BYTES_MAX))
