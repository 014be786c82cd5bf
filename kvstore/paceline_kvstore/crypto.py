"""Sealing: what makes a payload safe where others can read or write it. A stage before the chunk format (`codec`).

    offset  size  field
         0     8  magic "PCLKVSEA"
         8     1  version
         9     1  suite: 1 AES-256-GCM, 2 BLAKE2b with a key (readable by all, forged by nobody)
        10     6  zero
        16     8  id of the key
        24     8  when it was sealed, milliseconds since 1970, little-endian
        32    24  nonce; zero in suite 2
        56     8  zero
        64     -  payload, encrypted in suite 1
         -     -  tag: 16 bytes in suite 1, 32 in suite 2

The tag covers the header, the chunk's key (`ChunkKey.to_bytes`) and the payload, so that no part can be changed and no
object be served under another's name. In suite 1 each payload has a key of its own, derived from the first half of
192 random bits, and the second half is GCM's nonce (the construction of XAES-256-GCM, with BLAKE2b to derive): after
2**80 payloads under one key the chance that a nonce came twice is 2**-32. Must not do I/O but `read_key_file`; time and
randomness are arguments.
"""

from __future__ import annotations

import hmac
import re
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

from paceline_kvstore.codec import Buffer, as_bytes
from paceline_kvstore.errors import CorruptChunk, ForeignChunk, UnsupportedVersion
from paceline_kvstore.keys import ChunkKey

MAGIC = b"PCLKVSEA"
VERSION = 1
NONCE_BYTES = 24
KEY_BYTES = 32

_HEADER = struct.Struct("<8sBB6x8sQ24s8x")
HEADER_BYTES = _HEADER.size
_HALF = NONCE_BYTES // 2
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")


class Suite(IntEnum):
    """How a payload is sealed."""

    ENCRYPTED = 1
    SIGNED = 2

    @property
    def tag_bytes(self) -> int:
        return 16 if self is Suite.ENCRYPTED else 32


@dataclass(frozen=True, slots=True)
class SecretKey:
    """32 secret bytes. What is used is derived from them, for each purpose another."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(self.secret)}")

    @property
    def key_id(self) -> bytes:
        """8 bytes that name the key and don't give it away."""
        return self._derive(b"key id")[:8]

    def message_key(self, nonce: bytes) -> bytes:
        """The key of one payload under AES-256-GCM, from the first half of its nonce."""
        return self._derive(b"aes-gcm", nonce[:_HALF])

    def tag(self, *parts: Buffer) -> bytes:
        """BLAKE2b with a key, 32 bytes, over the parts as one."""
        digest = blake2b(key=self._derive(b"sign"), digest_size=32)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _derive(self, purpose: bytes, data: bytes = b"") -> bytes:
        return blake2b(data, key=self.secret, person=purpose, digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The key that seals and those that may still have sealed what is read."""

    current: SecretKey
    old: tuple[SecretKey, ...] = ()

    def find(self, key_id: bytes) -> SecretKey | None:
        return next((key for key in (self.current, *self.old) if key.key_id == key_id), None)


def read_key_file(path: Path) -> KeyRing:
    """A key in 64 hexadecimal digits a line, the current one first; blank lines and those with # are left out.

    To rotate: put a new line on top, everywhere, and take the old ones away once nothing sealed with them is wanted.
    Raises ValueError that names the file and the line, and never shows a key.
    """
    try:
        lines = path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read the key file {path}: {error}: check the path and its permissions") from error
    keys: list[SecretKey] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not _HEX_KEY.fullmatch(text):
            raise ValueError(f"key file {path}, line {number}: write 64 hexadecimal digits (openssl rand -hex 32)")
        key = SecretKey(bytes.fromhex(text))
        if key in keys:
            raise ValueError(f"key file {path}, line {number}: the key is there already: take one of them away")
        keys.append(key)
    if not keys:
        raise ValueError(f"key file {path} has no key: write 64 hexadecimal digits (openssl rand -hex 32)")
    return KeyRing(keys[0], tuple(keys[1:]))


def sealed_size(suite: Suite, payload_bytes: int) -> int:
    """Bytes of a sealed payload of that many bytes."""
    return HEADER_BYTES + payload_bytes + suite.tag_bytes


def seal(ring: KeyRing, suite: Suite, key: ChunkKey, payload: Buffer, *, now_ms: int, nonce: bytes) -> bytearray:
    """The payload sealed for that chunk. nonce: NONCE_BYTES of fresh randomness, used for nothing else."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, this one {len(nonce)}")
    source, secret = as_bytes(payload), ring.current
    target = bytearray(sealed_size(suite, len(source)))
    body = memoryview(target)[HEADER_BYTES:]
    if suite is Suite.SIGNED:
        header = _HEADER.pack(MAGIC, VERSION, suite, secret.key_id, now_ms, bytes(NONCE_BYTES))
        body[: len(source)] = source
        body[len(source) :] = secret.tag(header, key.to_bytes(), source)
    else:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        header = _HEADER.pack(MAGIC, VERSION, suite, secret.key_id, now_ms, nonce)
        AESGCM(secret.message_key(nonce)).encrypt_into(nonce[_HALF:], source, header + key.to_bytes(), body)
    target[:HEADER_BYTES] = header
    return target


@dataclass(frozen=True, slots=True)
class Unsealed:
    """payload: read-only, as it was sealed. sealed_ms: when, in milliseconds since 1970."""

    payload: memoryview
    sealed_ms: int


def payload_size(suite: Suite, sealed: Buffer) -> int:
    """Bytes of the payload in a buffer that a `seal` of that suite made; negative if it is too short to be one."""
    return len(as_bytes(sealed)) - sealed_size(suite, 0)


def unseal(ring: KeyRing, suite: Suite, key: ChunkKey, sealed: Buffer, target: memoryview | None = None) -> Unsealed:
    """What was sealed for that chunk by that suite. Nothing of a payload that is not as it was sealed is given out.

    Goes to the front of `target`; without one, an encrypted payload is in new memory and a signed one a view into
    `sealed`. Raises CorruptChunk, UnsupportedVersion, or ForeignChunk for a key that is not in the ring.
    """
    view, size = as_bytes(sealed), payload_size(suite, sealed)
    header, body = bytes(view[:HEADER_BYTES]), view[HEADER_BYTES:]
    secret, sealed_ms, nonce = _read_header(ring, suite, header, size)
    about = header + key.to_bytes()
    if suite is Suite.SIGNED:
        payload = body[:size]
        if not hmac.compare_digest(secret.tag(about, payload), body[size:]):
            raise CorruptChunk("the signature does not match")
        if target is not None:
            target[:size] = payload
            payload = target[:size]
        return Unsealed(payload.toreadonly(), sealed_ms)
    plain = memoryview(bytearray(size)) if target is None else target[:size]
    _decrypt(secret, nonce, about, body, plain)
    return Unsealed(plain.toreadonly(), sealed_ms)


def _read_header(ring: KeyRing, suite: Suite, header: bytes, size: int) -> tuple[SecretKey, int, bytes]:
    """Key, time and nonce, before anything but the header's form is known to be right."""
    if size < 0:
        raise CorruptChunk("the payload is too short to be sealed")
    magic, version, found, key_id, sealed_ms, nonce = _HEADER.unpack(header)
    if magic != MAGIC:
        raise CorruptChunk("the payload isn't sealed")
    if version != VERSION:
        raise UnsupportedVersion(f"the payload is sealed in version {version}, this reader knows {VERSION}")
    if found != suite:
        # Whoever expects secrecy must not take what anybody could read.
        raise CorruptChunk(f"the payload is sealed by suite {found}, expected is {suite}")
    secret = ring.find(key_id)
    if secret is None:
        raise ForeignChunk(f"the payload is sealed with key {key_id.hex()}, which is not in the key file")
    return secret, sealed_ms, nonce


def _decrypt(secret: SecretKey, nonce: bytes, about: bytes, body: memoryview, target: memoryview) -> None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        AESGCM(secret.message_key(nonce)).decrypt_into(nonce[_HALF:], body, about, target)
    except InvalidTag:
        raise CorruptChunk("the payload was changed after it was encrypted") from None
