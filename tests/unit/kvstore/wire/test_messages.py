"""Every message survives its bytes, and no bytes do anything but become a message or a ProtocolError."""

from __future__ import annotations

import contextlib
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline_kvstore import ChunkKey
from paceline_kvstore.stats import TierStats
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire.frames import HEAD_BYTES, HELLO_BYTES_MAX, Head, ProtocolError, decode_head

DIGEST = st.binary(min_size=32, max_size=32)
KEY = st.builds(ChunkKey, DIGEST, DIGEST, st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1))
KEYS = st.lists(KEY, max_size=5).map(tuple)
U64 = st.integers(0, 2**64 - 1)
TENANT = st.text(max_size=60)
HOLDER = st.text(max_size=30)

REQUEST = st.one_of(
    st.builds(msg.Hello, st.text(max_size=200)),
    st.builds(msg.Get, KEY, U64, U64, st.none() | KEY, st.none() | TENANT),
    st.builds(msg.Put, KEY, st.none() | KEY, TENANT, st.booleans()),
    st.builds(msg.Contains, KEYS, U64),
    st.builds(msg.Delete, KEY),
    st.builds(msg.Clear, st.none() | DIGEST, st.none() | TENANT),
    st.builds(msg.Keys, st.booleans()),
    st.just(msg.Stats()),
    st.just(msg.Flush()),
    st.builds(msg.Pin, HOLDER, KEYS, U64),
    st.builds(msg.Unpin, HOLDER),
    st.builds(msg.Extend, HOLDER, U64),
)
STATS = st.builds(TierStats, *[U64 for _ in fields(TierStats)])
REPLY = st.one_of(
    st.builds(msg.Welcome, U64, U64),
    st.just(msg.Hit()),
    st.just(msg.Miss()),
    st.builds(msg.TooLarge, U64),
    st.builds(msg.Count, U64),
    st.builds(msg.KeyPage, KEYS, st.booleans()),
    st.builds(msg.StatsReply, STATS, U64, U64, U64),
    st.builds(msg.Fail, st.sampled_from(msg.Reason), st.text(max_size=100)),
)


def split(frame: bytes) -> tuple[Head, bytes]:
    head = decode_head(frame[:HEAD_BYTES], msg.MESSAGE_FIELD_BYTES_MAX, 2**63)
    assert head.field_bytes == len(frame) - HEAD_BYTES
    return head, frame[HEAD_BYTES:]


@given(REQUEST, U64, st.integers(0, 2**63))
def test_a_request_comes_back_as_it_was(request: msg.Request, request_id: int, payload_bytes: int) -> None:
    head, body = split(msg.encode_request(request_id, request, payload_bytes))
    assert (head.request_id, head.payload_bytes) == (request_id, payload_bytes)
    assert msg.decode_request(head.kind, body) == request


@given(REPLY, U64, st.integers(0, 2**63))
def test_a_reply_comes_back_as_it_was(reply: msg.Reply, request_id: int, payload_bytes: int) -> None:
    head, body = split(msg.encode_reply(request_id, reply, payload_bytes))
    assert (head.request_id, head.payload_bytes) == (request_id, payload_bytes)
    assert msg.decode_reply(head.kind, body) == reply


@given(st.integers(0, 255), st.binary(max_size=400))
@example(2, b"")
@example(3, bytes(72) + b"\xff")
@example(10, bytes(8 + 71))
def test_no_bytes_do_anything_but_become_a_message_or_an_error(kind: int, body: bytes) -> None:
    for decode, encode in ((msg.decode_request, msg.encode_request), (msg.decode_reply, msg.encode_reply)):
        with contextlib.suppress(ProtocolError):
            message = decode(kind, body)
            assert split(encode(0, message))[1] == body, "two different frames must not mean the same"


@given(REQUEST, st.data())
def test_a_request_cut_short_or_made_longer_is_refused_or_another(request: msg.Request, data: st.DataObject) -> None:
    head, body = split(msg.encode_request(1, request))
    if body:
        cut = body[: data.draw(st.integers(0, len(body) - 1))]
        with contextlib.suppress(ProtocolError):
            assert msg.decode_request(head.kind, cut) != request
    with pytest.raises(ProtocolError):
        msg.decode_request(head.kind, body + b"x")


@given(st.binary(max_size=40))
def test_no_head_promises_more_than_the_limits(buffer: bytes) -> None:
    try:
        head = decode_head(buffer, 1000, 5000)
    except ProtocolError:
        return
    assert head.field_bytes <= 1000 and head.payload_bytes <= 5000


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n", "magic number"),
        (Head(2, 1, 10, 10).to_bytes().replace(b"PK\x01", b"PK\x09"), "protocol version 9, this side speaks 1"),
        (Head(2, 1, 101, 10).to_bytes(), "101 bytes of fields, the limit is 100"),
        (Head(2, 1, 10, 101).to_bytes(), "payload of 101 bytes, the limit is 100"),
        (b"PK", "24 bytes, this one has 2"),
    ],
)
def test_a_wrong_head_is_named(head: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode_head(head, 100, 100)


@pytest.mark.parametrize(
    ("kind", "body", "complaint"),
    [
        (99, b"", "kind 99 is no request"),
        (msg.Op.GET, bytes(72), "request get, key: a chunk holds 1 to"),
        (msg.Op.PUT, ChunkKey(bytes(32), bytes(32), 1).to_bytes() + b"\x04", "request put, flags: 4 is more than 3"),
        (msg.Op.CONTAINS, bytes(8 + 73), "request contains, keys: 73 bytes are no whole number"),
        (msg.Op.CONTAINS, bytes(8 + 72 * (msg.KEYS_MAX + 1)), "keys are too many, the limit is 4096"),
        (msg.Op.CLEAR, b"\x02\x01\x00\xff", "request clear, tenant: it isn't UTF-8"),
        (msg.Op.CLEAR, b"\x02\xff\xff", "request clear, tenant: 65535 bytes are too long"),
        (msg.Op.FLUSH, b"x", "request flush, the end: 1 bytes are too many"),
    ],
)
def test_a_wrong_request_is_named_with_its_field(kind: int, body: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        msg.decode_request(kind, body)


def test_a_long_complaint_is_cut_between_characters() -> None:
    head, body = split(msg.encode_reply(0, msg.Fail(msg.Reason.INTERNAL, "ä" * msg.MESSAGE_BYTES_MAX)))
    fail = msg.decode_reply(head.kind, body)
    assert isinstance(fail, msg.Fail) and set(fail.message) == {"ä"}


def test_what_does_not_fit_a_first_frame_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match=f"a frame takes {HELLO_BYTES_MAX}"):
        msg.encode_request(1, msg.Hello("x" * 5000))
