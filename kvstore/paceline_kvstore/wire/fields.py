"""Fields of a message, one after the other: numbers, keys, short texts. Must not do I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from paceline_kvstore.keys import KEY_BYTES, ChunkKey
from paceline_kvstore.wire.frames import ProtocolError

_U16 = struct.Struct("<H")
_U64 = struct.Struct("<Q")


def text_field(text: str) -> bytes:
    """UTF-8 behind its length (u16). ValueError beyond 65,535 bytes."""
    encoded = text.encode()
    if len(encoded) > 0xFFFF:
        raise ValueError(f"a text of {len(encoded)} bytes is too long to send")
    return _U16.pack(len(encoded)) + encoded


def number_field(number: int) -> bytes:
    """A u64."""
    return _U64.pack(number)


def keys_field(keys: Iterable[ChunkKey]) -> bytes:
    """Keys up to the end of the message."""
    return b"".join(key.to_bytes() for key in keys)


class FieldReader:
    """Takes fields off a message in order; each method raises ProtocolError that names `message` and the field."""

    def __init__(self, message: str, buffer: bytes) -> None:
        self._message = message
        self._buffer = buffer
        self._at = 0

    def raw(self, name: str, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._buffer):
            raise self._wrong(name, f"{num_bytes} bytes are due, {len(self._buffer) - self._at} are left")
        taken, self._at = self._buffer[self._at : end], end
        return taken

    def byte(self, name: str, allowed: int) -> int:
        """A byte that is at most `allowed`."""
        value = self.raw(name, 1)[0]
        if value > allowed:
            raise self._wrong(name, f"{value} is more than {allowed}")
        return value

    def number(self, name: str) -> int:
        return _U64.unpack(self.raw(name, _U64.size))[0]

    def text(self, name: str, bytes_max: int) -> str:
        size = _U16.unpack(self.raw(name, _U16.size))[0]
        if size > bytes_max:
            raise self._wrong(name, f"{size} bytes are too long, the limit is {bytes_max}")
        try:
            return self.raw(name, size).decode()
        except UnicodeDecodeError:
            raise self._wrong(name, "it isn't UTF-8") from None

    def key(self, name: str) -> ChunkKey:
        try:
            return ChunkKey.from_bytes(self.raw(name, KEY_BYTES))
        except ValueError as error:
            raise self._wrong(name, str(error)) from None

    def keys(self, name: str, count_max: int) -> tuple[ChunkKey, ...]:
        """All keys up to the end of the message, in one go."""
        left = len(self._buffer) - self._at
        if left % KEY_BYTES:
            raise self._wrong(name, f"{left} bytes are no whole number of keys of {KEY_BYTES}")
        if left // KEY_BYTES > count_max:
            raise self._wrong(name, f"{left // KEY_BYTES} keys are too many, the limit is {count_max}")
        return tuple(self.key(name) for _ in range(left // KEY_BYTES))

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._buffer):
            raise self._wrong("the end", f"{len(self._buffer) - self._at} bytes are too many")

    def _wrong(self, name: str, why: str) -> ProtocolError:
        return ProtocolError(f"{self._message}, {name}: {why}")
