"""The chunk format: what goes in comes out, and nothing else is ever taken for it."""

from __future__ import annotations

import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore import ChunkKey, CorruptChunk, ForeignChunk, KVStoreError, UnsupportedVersion, codec
from paceline_kvstore.keys import KEY_BYTES

DIGESTS = st.binary(min_size=32, max_size=32)
COUNTS = st.integers(0, 2**32 - 1)
KEYS = st.builds(ChunkKey, DIGESTS, DIGESTS, st.integers(1, 2**32 - 1), COUNTS)
PAYLOADS = st.binary(max_size=300)
KEY = ChunkKey(b"n" * 32, b"c" * 32, 16)


@given(KEYS)
def test_a_key_survives_the_wire(key: ChunkKey):
    wire = key.to_bytes()
    assert len(wire) == KEY_BYTES
    assert ChunkKey.from_bytes(wire) == key


@given(KEYS, KEYS)
def test_different_keys_have_different_wire_forms(one: ChunkKey, other: ChunkKey):
    assert (one == other) == (one.to_bytes() == other.to_bytes())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"n" * 31, b"c" * 32, 1), "namespace has 32 bytes"),
        ((b"n" * 32, b"c" * 33, 1), "chain has 32 bytes"),
        ((b"n" * 32, b"c" * 32, 0), "1 to 4294967295 tokens"),
        ((b"n" * 32, b"c" * 32, 1, -1), "rank is 0"),
        ((b"n" * 32, b"c" * 32, 1, 2**32), "rank is 0"),
    ],
)
def test_a_key_that_cannot_be_is_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        ChunkKey(*arguments)


@given(KEYS, PAYLOADS)
def test_round_trip(key: ChunkKey, payload: bytes):
    chunk = codec.encode(key, payload)
    assert len(chunk) == codec.encoded_size(len(payload))
    assert codec.decode(chunk, key) == payload
    assert codec.read_key(chunk) == key


def test_decode_copies_nothing_and_hands_out_no_writable_memory():
    chunk = codec.encode(KEY, b"payload")
    view = codec.decode(chunk, KEY)
    assert view.readonly
    assert view.obj is chunk


def test_a_payload_of_any_element_type_is_its_bytes():
    floats = array.array("f", [1.0, 2.0, 3.0])
    assert codec.decode(codec.encode(KEY, memoryview(floats)), KEY) == floats.tobytes()


def test_a_strided_payload_is_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        codec.encode(KEY, memoryview(bytes(8))[::2])


@given(PAYLOADS, st.integers(0, 8))
def test_encode_into_a_given_buffer_leaves_the_rest_alone(payload: bytes, spare: int):
    target = bytearray(b"\xee" * (codec.encoded_size(len(payload)) + spare))
    size = codec.encode_into(target, KEY, payload)
    assert codec.decode(target[:size], KEY) == payload
    assert target[size:] == b"\xee" * spare


def test_encode_into_a_buffer_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="needs 129 bytes, the buffer has 128"):
        codec.encode_into(bytearray(128), KEY, b"x")


@given(KEYS, PAYLOADS, st.data())
def test_any_single_bit_flip_is_detected(key: ChunkKey, payload: bytes, data: st.DataObject):
    chunk = codec.encode(key, payload)
    bit = data.draw(st.integers(0, len(chunk) * 8 - 1))
    chunk[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(KVStoreError):
        codec.decode(chunk, key)


def test_every_single_bit_flip_of_one_chunk_is_detected():
    clean = codec.encode(KEY, b"some KV")
    for bit in range(len(clean) * 8):
        chunk = bytearray(clean)
        chunk[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises((CorruptChunk, UnsupportedVersion)):
            codec.decode(chunk, KEY)


@given(PAYLOADS, st.data())
def test_a_truncated_chunk_is_corrupt(payload: bytes, data: st.DataObject):
    chunk = codec.encode(KEY, payload)
    length = data.draw(st.integers(0, len(chunk) - 1))
    with pytest.raises(CorruptChunk):
        codec.decode(chunk[:length], KEY)


@given(PAYLOADS, st.binary(min_size=1, max_size=64))
def test_an_extended_chunk_is_corrupt(payload: bytes, extra: bytes):
    with pytest.raises(CorruptChunk):
        codec.decode(codec.encode(KEY, payload) + extra, KEY)


@given(KEYS, KEYS, PAYLOADS)
def test_an_intact_chunk_of_another_key_is_foreign(one: ChunkKey, other: ChunkKey, payload: bytes):
    chunk = codec.encode(one, payload)
    if one == other:
        assert codec.decode(chunk, other) == payload
    else:
        with pytest.raises(ForeignChunk):
            codec.decode(chunk, other)


@pytest.mark.parametrize(
    "other",
    [
        ChunkKey(b"N" * 32, KEY.chain, 16),
        ChunkKey(KEY.namespace, b"C" * 32, 16),
        ChunkKey(KEY.namespace, KEY.chain, 17),
        ChunkKey(KEY.namespace, KEY.chain, 16, rank=1),
    ],
)
def test_each_part_of_the_key_counts(other: ChunkKey):
    with pytest.raises(ForeignChunk):
        codec.decode(codec.encode(KEY, b"x"), other)


def test_another_version_is_told_apart_from_corruption():
    chunk = codec.encode(KEY, b"x")
    chunk[8] = codec.VERSION + 1
    with pytest.raises(UnsupportedVersion, match="format version 2, this reader knows 1"):
        codec.decode(chunk, KEY)


def test_arbitrary_bytes_are_not_a_chunk():
    with pytest.raises(CorruptChunk, match="not a chunk"):
        codec.decode(bytes(200), KEY)


@given(KEYS, PAYLOADS)
def test_a_header_beside_its_payload_is_checked_like_a_chunk(key: ChunkKey, payload: bytes):
    header = codec.encode_header(key, payload)
    assert header + payload == codec.encode(key, payload)
    codec.check(header, payload, key)
    with pytest.raises(CorruptChunk):
        codec.check(header, payload + b"x", key)


@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=4))
def test_a_header_made_piece_by_piece_is_the_same(payload: bytes, cuts: list[int]) -> None:
    checksum = codec.Checksum(KEY, len(payload))
    edges = [0, *sorted(min(cut, len(payload)) for cut in cuts), len(payload)]
    for begin, end in pairwise(edges):
        checksum.add(payload[begin:end])
    assert checksum.header() == codec.encode_header(KEY, payload)
