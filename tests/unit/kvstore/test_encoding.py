"""Smaller forms of payloads: what comes back, how far from what went in, and what is refused."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore import ChunkKey, encoding
from paceline_kvstore.encoding import Element, Encoding
from paceline_kvstore.errors import CorruptChunk, KVStoreError, UnsupportedVersion
from paceline_kvstore.tiers import MemoryTier
from paceline_kvstore.tiers.encoded import EncodedTier

NUMBERS = (Element.FLOAT32, Element.FLOAT16, Element.BFLOAT16)
LOSSY = pytest.mark.parametrize("form", [Encoding.INT8, Encoding.FP8])


def _raw(numbers: np.ndarray, element: Element) -> bytes:
    if element is Element.BFLOAT16:
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return numbers.astype(np.float32 if element is Element.FLOAT32 else np.float16).tobytes()


def _numbers(raw: bytes, element: Element) -> np.ndarray:
    if element is Element.BFLOAT16:
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, np.float32 if element is Element.FLOAT32 else np.float16).astype(np.float32)


def _there_and_back(payload: bytes, form: Encoding, element: Element) -> bytes:
    encoded = encoding.encode(payload, form, element)
    assert len(encoded) != len(payload)
    target = bytearray(encoding.decoded_bytes(encoded) + 3)
    size = encoding.decode(encoded, target)
    assert target[size:] == bytes(3)
    return bytes(target[:size])


@given(payload=st.binary(max_size=2000), element=st.sampled_from(list(Element)))
def test_zstd_gives_the_same_bytes_back(payload: bytes, element: Element) -> None:
    assert _there_and_back(payload, Encoding.ZSTD, element) == payload


def test_a_form_never_has_the_payloads_own_length() -> None:
    lengths = set()
    for size in range(200):
        payload = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
        encoded = encoding.encode(payload, Encoding.ZSTD, Element.BYTES)
        assert len(encoded) != size and _there_and_back(payload, Encoding.ZSTD, Element.BYTES) == payload
        lengths.add(len(encoded) - size)
    assert {-1, 1} <= lengths, "the sizes around it occur"


@LOSSY
@pytest.mark.parametrize("element", NUMBERS)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_numbers_come_back_within_half_a_step_of_their_group(form: Encoding, element: Element, size: int) -> None:
    rng = np.random.default_rng(size)
    numbers = _numbers(_raw(rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3, size), element), element)
    back = _numbers(_there_and_back(_raw(numbers, element), form, element), element)
    for begin in range(0, size, encoding.GROUP_ITEMS):
        group, found = (each[begin : begin + encoding.GROUP_ITEMS] for each in (numbers, back))
        most = np.abs(group).max()
        # fp8 has 3 bits behind the point, and below the smallest of its exponents even steps of 2^-9.
        step = most / 127 if form is Encoding.INT8 else np.maximum(np.abs(group) / 8, most / 448 * 2.0**-9)
        rounding = np.abs(found) * {Element.FLOAT32: 1e-6, Element.FLOAT16: 1e-3, Element.BFLOAT16: 8e-3}[element]
        assert (np.abs(found - group) <= step * 0.51 + rounding + 1e-7).all()


@LOSSY
def test_large_small_and_zero_groups_keep_their_own_scale(form: Encoding) -> None:
    numbers = np.concatenate([np.zeros(64), np.full(64, 1e30), np.full(64, -1e-30)]).astype(np.float32)
    back = _numbers(_there_and_back(numbers.tobytes(), form, Element.FLOAT32), Element.FLOAT32)
    assert (back[:64] == 0).all()
    assert np.allclose(back[64:], numbers[64:], rtol=1e-6)


def test_every_fp8_number_is_kept_as_it_is() -> None:
    code = np.arange(256)
    kept = encoding._float32_of_fp8()[code[(code & 127) != 127]]
    assert kept.max() == 448.0 and kept[kept > 0].min() == 2.0**-9
    numbers = np.repeat(kept, 64).reshape(-1, 64).astype(np.float32)
    numbers[:, 0] = 448.0  # so that the scale is 1
    assert _there_and_back(numbers.tobytes(), Encoding.FP8, Element.FLOAT32) == numbers.tobytes()


@LOSSY
def test_a_quarter_of_float32_is_left(form: Encoding) -> None:
    payload = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32).tobytes()
    assert len(encoding.encode(payload, form, Element.FLOAT32)) < 0.27 * len(payload)


@LOSSY
@pytest.mark.parametrize(
    ("payload", "element"),
    [
        (np.array([1, np.nan], np.float32).tobytes(), Element.FLOAT32),
        (np.array([1, -np.inf], np.float16).tobytes(), Element.FLOAT16),
        (b"abc", Element.FLOAT16),
        (b"abcd", Element.BYTES),
    ],
)
def test_what_has_no_such_form_is_not_kept(form: Encoding, payload: bytes, element: Element) -> None:
    place = MemoryTier(1 << 20)
    tier = EncodedTier(place, form, element)
    assert not tier.put(_key(1), payload)
    assert tier.stats.refused == 1 and place.bytes_used == 0


@pytest.mark.parametrize("form", [Encoding.ZSTD, Encoding.INT8, Encoding.FP8])
def test_whatever_is_broken_is_told_and_never_fills_memory(form: Encoding) -> None:
    payload = np.random.default_rng(0).standard_normal(100).astype(np.float32).tobytes()
    good = encoding.encode(payload, form, Element.FLOAT32)
    for cut in range(len(good)):
        with pytest.raises(KVStoreError):
            _decode(good[:cut])
    for position in range(encoding.HEADER_BYTES):
        bad = bytearray(good)
        bad[position] ^= 0x55
        with pytest.raises((CorruptChunk, UnsupportedVersion)):
            _decode(bytes(bad))
    with pytest.raises(CorruptChunk, match="are the most"):
        encoding.decoded_bytes(good[:8] + struct.pack("<Q", 1 << 40))


def test_a_tier_keeps_less_and_gives_the_same() -> None:
    payload = b"attention" * 5000
    place = MemoryTier(1 << 20)
    tier = EncodedTier(place, Encoding.ZSTD, Element.BYTES)
    assert tier.put(_key(1), payload, tenant="a") and place.bytes_used < len(payload) / 2
    assert tier.get(_key(1)) == payload and tier.get(_key(2)) is None
    target = bytearray(len(payload))
    assert tier.read_into(_key(1), target) == len(payload) and target == payload
    with pytest.raises(ValueError, match=f"the payload has {len(payload)} bytes, the buffer 10"):
        tier.read_into(_key(1), bytearray(10))
    lease = tier.lease(_key(1))
    assert lease is not None
    with lease as view:
        assert view == payload
    assert tier.contains([_key(1), _key(2)]) == 1 and set(tier.keys()) == {_key(1)}
    assert tier.clear(tenant="a") == 1 and (tier.stats.corrupt, tier.stats.errors) == (0, 0)


def test_what_a_writer_without_encoding_left_is_a_miss_counted_and_dropped() -> None:
    place = MemoryTier(1 << 20)
    tier = EncodedTier(place, Encoding.ZSTD, Element.BYTES)
    for read in (tier.get, tier.lease, lambda key: tier.read_into(key, bytearray(10))):
        place.put(_key(1), b"plain bytes of no form at all")
        assert read(_key(1)) is None and _key(1) not in place
    assert tier.stats.corrupt == 3 and tier.quarantine.counts["corrupt"] == 3


def _key(number: int) -> ChunkKey:
    return ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 16)


def _decode(encoded: bytes) -> bytes:
    target = bytearray(encoding.decoded_bytes(encoded))
    return bytes(target[: encoding.decode(encoded, target)])
