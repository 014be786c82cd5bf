"""Sealed payloads: they come back as they were, or not at all, whatever was done to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_kvstore import ChunkKey, CorruptChunk, ForeignChunk, KVStoreError, UnsupportedVersion, crypto
from paceline_kvstore.crypto import KeyRing, SecretKey, Suite

KEY = ChunkKey(b"n" * 32, b"c" * 32, 16, 1)
OLD, NEW, OTHER = (SecretKey(bytes([number]) * 32) for number in (1, 2, 3))
RING = KeyRing(NEW, (OLD,))
SUITES = pytest.mark.parametrize("suite", list(Suite))
PAYLOAD = bytes(range(256)) * 4


def seal(suite: Suite, payload: bytes = PAYLOAD, ring: KeyRing = RING, key: ChunkKey = KEY) -> bytearray:
    return crypto.seal(ring, suite, key, payload, now_ms=1_700_000_000_123, nonce=os.urandom(crypto.NONCE_BYTES))


@SUITES
@given(payload=st.binary(max_size=2000))
def test_a_payload_comes_back_with_its_time(suite: Suite, payload: bytes) -> None:
    sealed = seal(suite, payload)
    assert len(sealed) == crypto.sealed_size(suite, len(payload))
    unsealed = crypto.unseal(RING, suite, KEY, sealed)
    assert unsealed.payload == payload and unsealed.payload.readonly
    assert unsealed.sealed_ms == 1_700_000_000_123
    target = memoryview(bytearray(len(payload) + 5))
    assert crypto.unseal(RING, suite, KEY, sealed, target).payload == payload == bytes(target[: len(payload)])


@SUITES
def test_no_byte_can_be_changed(suite: Suite) -> None:
    sealed = seal(suite, b"attention" * 3)
    for index in range(len(sealed)):
        for flip in (1, 0x80, 0xFF):
            forged = bytearray(sealed)
            forged[index] ^= flip
            with pytest.raises(KVStoreError):
                crypto.unseal(RING, suite, KEY, forged)


@SUITES
@given(data=st.data())
@settings(max_examples=50)
def test_no_length_can_be_changed(suite: Suite, data: st.DataObject) -> None:
    sealed = seal(suite, b"attention" * 3)
    cut = data.draw(st.integers(0, len(sealed) - 1))
    for forged in (sealed[:cut], sealed + b"x", sealed[:cut] + sealed[cut + 1 :], b"x" + sealed):
        with pytest.raises(KVStoreError):
            crypto.unseal(RING, suite, KEY, forged)


@SUITES
@pytest.mark.parametrize(
    "other",
    [
        ChunkKey(b"m" * 32, b"c" * 32, 16, 1),
        ChunkKey(b"n" * 32, b"d" * 32, 16, 1),
        ChunkKey(b"n" * 32, b"c" * 32, 17, 1),
        ChunkKey(b"n" * 32, b"c" * 32, 16, 0),
    ],
)
def test_no_object_is_served_under_anothers_name(suite: Suite, other: ChunkKey) -> None:
    with pytest.raises(CorruptChunk):
        crypto.unseal(RING, suite, other, seal(suite))


@SUITES
def test_old_keys_read_what_they_sealed_and_the_new_one_seals(suite: Suite) -> None:
    before = seal(suite, ring=KeyRing(OLD))
    assert crypto.unseal(RING, suite, KEY, before).payload == PAYLOAD
    assert crypto.unseal(KeyRing(NEW), suite, KEY, seal(suite)).payload == PAYLOAD
    with pytest.raises(ForeignChunk, match=f"key {OLD.key_id.hex()}, which is not in the key file"):
        crypto.unseal(KeyRing(NEW), suite, KEY, before)


@SUITES
def test_a_key_id_alone_opens_nothing(suite: Suite) -> None:
    forged = seal(suite, ring=KeyRing(OTHER))
    forged[16:24] = NEW.key_id
    with pytest.raises(CorruptChunk):
        crypto.unseal(RING, suite, KEY, forged)


def test_what_is_only_signed_is_not_taken_for_encrypted_nor_the_other_way() -> None:
    for suite, other in ((Suite.SIGNED, Suite.ENCRYPTED), (Suite.ENCRYPTED, Suite.SIGNED)):
        forged = seal(suite)
        with pytest.raises(CorruptChunk, match="expected is"):
            crypto.unseal(RING, other, KEY, forged)
        forged[9] = other
        with pytest.raises(CorruptChunk):
            crypto.unseal(RING, other, KEY, forged)


def test_another_version_and_a_plain_payload_are_named() -> None:
    sealed = seal(Suite.SIGNED)
    sealed[8] = 9
    with pytest.raises(UnsupportedVersion, match="version 9, this reader knows 1"):
        crypto.unseal(RING, Suite.SIGNED, KEY, sealed)
    with pytest.raises(CorruptChunk, match="isn't sealed"):
        crypto.unseal(RING, Suite.SIGNED, KEY, PAYLOAD)


def test_encryption_hides_the_payload_and_never_repeats_itself() -> None:
    payload = b"A" * 4096
    first, second = (bytes(seal(Suite.ENCRYPTED, payload)) for _ in range(2))
    assert b"AAAA" not in first and first[64:] != second[64:]
    assert first[16:24] == second[16:24] == NEW.key_id
    assert payload in bytes(seal(Suite.SIGNED, payload))


def test_both_halves_of_the_nonce_count() -> None:
    sealed = {
        bytes(crypto.seal(RING, Suite.ENCRYPTED, KEY, PAYLOAD, now_ms=1, nonce=nonce))[64:]
        for nonce in (bytes(24), b"\x01" + bytes(23), bytes(23) + b"\x01")
    }
    assert len(sealed) == 3
    assert NEW.message_key(bytes(24)) != NEW.message_key(b"\x01" + bytes(23)) != OLD.message_key(b"\x01" + bytes(23))
    with pytest.raises(ValueError, match="a nonce has 24 bytes, this one 12"):
        crypto.seal(RING, Suite.ENCRYPTED, KEY, PAYLOAD, now_ms=1, nonce=bytes(12))


def test_the_format_is_what_it_was() -> None:
    """Objects outlive releases: another release must read these bytes."""
    sealed = crypto.seal(KeyRing(OLD), Suite.ENCRYPTED, KEY, b"kv", now_ms=1000, nonce=bytes(range(24)))
    signed = crypto.seal(KeyRing(OLD), Suite.SIGNED, KEY, b"kv", now_ms=1000, nonce=bytes(range(24)))
    assert sealed.hex() == GOLDEN_ENCRYPTED
    assert signed.hex() == GOLDEN_SIGNED


GOLDEN_ENCRYPTED = (
    "50434c4b565345410101000000000000a56aabb288615775e803000000000000000102030405060708090a0b0c0d0e0f1011"
    "121314151617000000000000000014347186066f3e380ac54d008ba66a4060e3"
)
GOLDEN_SIGNED = (
    "50434c4b565345410102000000000000a56aabb288615775e803000000000000000000000000000000000000000000000000"
    "00000000000000000000000000006b7628ee2d692302266d4d6f621143be887dd268a8e1e27e210adbf06a56062fa5fc"
)


def test_a_key_file_holds_the_current_key_and_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# rotated in May\n{NEW.secret.hex()}\n\n  {OLD.secret.hex().upper()}\n")
    assert crypto.read_key_file(path) == RING


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no key: write 64 hexadecimal digits"),
        ("# nothing\n", "has no key"),
        ("ab" * 31, "line 1: write 64 hexadecimal digits"),
        ("# k\n" + "ab" * 32 + "\n" + "xy" * 32, "line 3: write 64"),
        ("ab" * 32 + "\n" + "AB" * 32, "line 2: the key is there already"),
    ],
)
def test_a_wrong_key_file_is_named_by_line_and_shows_no_key(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        crypto.read_key_file(path)
    assert str(path) in str(caught.value) and "abab" not in str(caught.value) and "xyxy" not in str(caught.value)
    with pytest.raises(ValueError, match="can't read the key file"):
        crypto.read_key_file(tmp_path / "none")


def test_a_key_does_not_show_in_logs() -> None:
    assert OLD.secret.hex() not in repr(RING) and repr(OLD.secret) not in repr(RING)
