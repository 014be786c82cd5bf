"""Smaller forms of payloads, for tiers below memory. Must not do I/O.

    magic "PKVE", version u8, form u8, element u8, 0 u8, payload bytes u64, little endian: HEADER_BYTES
    zstd: one frame of the items' bytes, all first bytes before all second ones and so on, then perhaps one byte more
    int8, fp8: a float32 scale for every GROUP_ITEMS items, then one byte an item

zstd gives the same bytes back. int8 and fp8 (E4M3, as in the OCP 8-bit floating point specification) give numbers back
that are up to half a step of their group's scale beside the ones that went in, so what is computed from them is another
state: `StoreSettings.namespace` keeps the two apart. A payload says what it is, so a reader needs no settings.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from paceline_kvstore.codec import Buffer, as_bytes
from paceline_kvstore.errors import CorruptChunk, UnsupportedVersion

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MAGIC, VERSION = b"PKVE", 1
GROUP_ITEMS = 64
ZSTD_LEVEL = 1
PAYLOAD_BYTES_MAX = 1 << 30
"""What says that it expands to more is broken, or meant to fill this machine's memory."""
FP8_MAX = 448.0
_HEAD = struct.Struct("<4sBBBBQ")
HEADER_BYTES = _HEAD.size


class Encoding(StrEnum):
    """How a tier keeps payloads."""

    NONE = "none"
    ZSTD = "zstd"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def is_lossy(self) -> bool:
        return self in (Encoding.INT8, Encoding.FP8)


class Element(StrEnum):
    """What a payload's items are: numbers, or bytes of which nothing is known."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    BYTES = "bytes"

    @property
    def num_bytes(self) -> int:
        return {Element.FLOAT32: 4, Element.BYTES: 1}.get(self, 2)


_FORMS = (Encoding.ZSTD, Encoding.INT8, Encoding.FP8)
_ELEMENTS = (Element.BYTES, Element.FLOAT16, Element.BFLOAT16, Element.FLOAT32)


def encode(payload: Buffer, encoding: Encoding, element: Element) -> bytes:
    """The payload's smaller form, never as long as the payload itself.

    ValueError for a lossy form of something that isn't whole, finite numbers.
    """
    view = as_bytes(payload)
    if encoding.is_lossy:
        body = _quantized(view, encoding, element)
    else:
        import zstandard

        items = 1 if len(view) % element.num_bytes else element.num_bytes
        planes = np.frombuffer(view, np.uint8).reshape(-1, items).T
        body = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes.tobytes())
        element = element if items > 1 else Element.BYTES
    head = _HEAD.pack(MAGIC, VERSION, _FORMS.index(encoding), _ELEMENTS.index(element), 0, len(view))
    # A reader that knows nothing of forms tells a payload by its length.
    padding = b"\0" if HEADER_BYTES + len(body) == len(view) else b""
    return b"".join((head, body, padding))


def decoded_bytes(encoded: Buffer) -> int:
    """Bytes of the payload, up to PAYLOAD_BYTES_MAX. CorruptChunk or UnsupportedVersion if this is no smaller form."""
    return _head(as_bytes(encoded))[2]


def decode(encoded: Buffer, target: bytearray | memoryview) -> int:
    """Write the payload to the front of `target`, which has `decoded_bytes` or more; its bytes.

    CorruptChunk or UnsupportedVersion if this is no smaller form.
    """
    view = as_bytes(encoded)
    encoding, element, size = _head(view)
    body, out = view[HEADER_BYTES:], as_bytes(target)[:size]
    if encoding.is_lossy:
        _restore(body, encoding, element, out)
        return size
    import zstandard

    try:
        expanded = zstandard.get_frame_parameters(body).content_size
        if expanded != size or size % element.num_bytes:
            raise CorruptChunk(f"a payload of {size} bytes would expand to {expanded}")
        planes = zstandard.ZstdDecompressor().decompress(body)
    except zstandard.ZstdError as error:
        raise CorruptChunk(f"a payload that can't be expanded: {error}") from error
    source = np.frombuffer(planes, np.uint8).reshape(element.num_bytes, -1)
    np.frombuffer(out, np.uint8).reshape(-1, element.num_bytes)[:] = source.T
    return size


def _head(view: memoryview) -> tuple[Encoding, Element, int]:
    if len(view) < HEADER_BYTES:
        raise CorruptChunk(f"{len(view)} bytes are no encoded payload")
    magic, version, form, element, flags, size = cast(tuple[bytes, int, int, int, int, int], _HEAD.unpack_from(view))
    if magic != MAGIC:
        raise CorruptChunk("not an encoded payload: it was written without an encoding")
    if version != VERSION or form >= len(_FORMS) or element >= len(_ELEMENTS) or flags:
        raise UnsupportedVersion(f"encoded by version {version} as form {form} of element {element}")
    if size > PAYLOAD_BYTES_MAX:
        raise CorruptChunk(f"a payload of {size} bytes: {PAYLOAD_BYTES_MAX} are the most")
    return _FORMS[form], _ELEMENTS[element], size


def _quantized(view: memoryview, encoding: Encoding, element: Element) -> bytes:
    if element is Element.BYTES or len(view) % element.num_bytes:
        raise ValueError(f"{encoding} is a form of numbers, not of {len(view)} bytes of {element}")
    numbers = _numbers(view, element)
    num_groups = -(-len(numbers) // GROUP_ITEMS)
    groups = np.zeros((num_groups, GROUP_ITEMS), np.float32)
    groups.reshape(-1)[: len(numbers)] = numbers
    most = np.maximum(groups.max(axis=1), -groups.min(axis=1))
    if not np.isfinite(most).all():
        raise ValueError("numbers that aren't finite have no smaller form")
    scales = most / np.float32(127 if encoding is Encoding.INT8 else FP8_MAX)
    # Where all are 0 any divisor will do.
    groups /= np.where(scales > 0, scales, np.float32(1))[:, None]
    if encoding is Encoding.INT8:
        values = np.clip(np.rint(groups, out=groups), -127, 127).astype(np.int8).view(np.uint8)
    else:
        values = _fp8_of_float16()[groups.astype(np.float16).view(np.uint16)]
    return scales.tobytes() + values.reshape(-1)[: len(numbers)].tobytes()


def _restore(body: memoryview, encoding: Encoding, element: Element, out: memoryview) -> None:
    num_items = len(out) // element.num_bytes
    num_groups = -(-num_items // GROUP_ITEMS)
    if element is Element.BYTES or len(out) % element.num_bytes or len(body) != 4 * num_groups + num_items:
        raise CorruptChunk(f"{len(body)} bytes are not {num_items} numbers in {encoding}")
    scales = np.frombuffer(body[: 4 * num_groups], np.float32)
    values = np.frombuffer(body[4 * num_groups :], np.uint8)
    groups = np.zeros((num_groups, GROUP_ITEMS), np.float32)
    if encoding is Encoding.INT8:
        groups.reshape(-1)[:num_items] = values.view(np.int8)
    else:
        groups.reshape(-1)[:num_items] = _float32_of_fp8()[values]
    groups *= scales[:, None]
    _write_numbers(groups.reshape(-1)[:num_items], element, out)


def _numbers(view: memoryview, element: Element) -> Floats:
    if element is Element.FLOAT32:
        return np.frombuffer(view, np.float32)
    if element is Element.FLOAT16:
        return np.frombuffer(view, np.float16).astype(np.float32)
    return (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _write_numbers(numbers: Floats, element: Element, out: memoryview) -> None:
    if element is not Element.BFLOAT16:
        np.frombuffer(out, np.float32 if element is Element.FLOAT32 else np.float16)[:] = numbers
        return
    bits = numbers.view(np.uint32)
    # To the nearest, of two equally near to the even one.
    np.frombuffer(out, np.uint16)[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@lru_cache(maxsize=1)
def _float32_of_fp8() -> Floats:
    """The numbers of E4M3's 256 codes; the two without one are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    size[(code & 127) == 127] = np.nan
    return np.where(code > 127, -size, size).astype(np.float32)


@lru_cache(maxsize=1)
def _fp8_of_float16() -> Bytes:
    """By a float16's bits, the nearest code; of two equally near the even one, beyond the largest the largest."""
    sizes = _float32_of_fp8()[:127]
    halves = np.arange(0x8000, dtype=np.uint16).view(np.float16)
    halves = np.nan_to_num(np.minimum(halves, np.float16(FP8_MAX)), nan=FP8_MAX).astype(np.float32)
    above = np.clip(np.searchsorted(sizes, halves), 1, 126)
    to_lower, to_upper = halves - sizes[above - 1], sizes[above] - halves
    is_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (above % 2 == 1))
    codes = np.where(is_lower, above - 1, above).astype(np.uint8)
    return np.concatenate((codes, codes | np.uint8(128)))
