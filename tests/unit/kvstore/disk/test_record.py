"""The disk format: headers survive the round trip, and nothing else passes for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore import ChunkKey, CorruptChunk, UnsupportedVersion, codec
from paceline_kvstore.disk import record as disk_record
from paceline_kvstore.disk.record import (
    BLOCK,
    PAYLOAD_MAX,
    Record,
    decode_record,
    decode_segment,
    encode_record,
    encode_segment,
    record_bytes,
    tenant_digest,
)

U64 = st.integers(0, 2**64 - 1)
RECORDS = st.builds(
    Record,
    payload_bytes=st.integers(0, PAYLOAD_MAX),
    stored_ms=U64,
    tenant=st.binary(min_size=16, max_size=16),
    parent=st.binary(min_size=72, max_size=72),
    chunk=st.binary(min_size=128, max_size=128),
    dead=st.booleans(),
)


@given(RECORDS, U64, U64)
def test_a_header_survives(record: Record, nonce: int, offset: int):
    block = encode_record(record, nonce, offset).ljust(BLOCK, b"\0")
    assert len(block) == BLOCK
    assert decode_record(block, nonce, offset) == record


@given(RECORDS, U64, U64, st.data())
def test_any_bit_flip_in_a_header_is_detected(record: Record, nonce: int, offset: int, data: st.DataObject):
    block = bytearray(encode_record(record, nonce, offset))
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptChunk):
        decode_record(block, nonce, offset)


def test_a_header_counts_only_in_its_own_place():
    block = encode_record(Record(5), nonce=1, offset=BLOCK)
    for nonce, offset in ((2, BLOCK), (1, 2 * BLOCK)):
        with pytest.raises(CorruptChunk, match="another place"):
            decode_record(block, nonce, offset)


def test_the_key_is_the_chunk_headers():
    key = ChunkKey(b"n" * 32, b"c" * 32, 16, 3)
    assert Record(1, chunk=codec.encode_header(key, b"x")).key == key.to_bytes()


def test_a_segments_header_names_its_number_and_version(monkeypatch: pytest.MonkeyPatch):
    block = encode_segment(7, 99)
    assert len(block) == BLOCK
    assert decode_segment(block, 7) == 99
    with pytest.raises(CorruptChunk, match="that of segment 7"):
        decode_segment(block, 8)
    with pytest.raises(CorruptChunk, match="not a segment"):
        decode_segment(bytes(BLOCK), 7)
    monkeypatch.setattr(disk_record, "VERSION", 2)
    with pytest.raises(UnsupportedVersion, match="version 1, this reader knows 2"):
        decode_segment(block, 7)


@pytest.mark.parametrize(("payload", "size"), [(0, BLOCK), (1, 2 * BLOCK), (BLOCK, 2 * BLOCK), (BLOCK + 1, 3 * BLOCK)])
def test_records_take_whole_blocks(payload: int, size: int):
    assert record_bytes(payload) == size


def test_tenants_have_digests_and_nobody_has_zeros():
    assert tenant_digest("") == bytes(16)
    assert len({tenant_digest(name) for name in ("", "a", "b", "ab")}) == 4
