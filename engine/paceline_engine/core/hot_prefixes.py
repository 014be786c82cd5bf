"""Which stored chunks are worth having on the device before the first request comes: those used twice, then the latest.

Only hashes are kept and written, never tokens or salts: a list of them tells nobody what was said. Imports neither
tensors nor I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from paceline_api.identity import DIGEST_SIZE
from paceline_engine.records import require_msgspec

MAX_CHUNKS = 2048
VERSION = 1


@dataclass(slots=True)
class _Chunk:
    """The hashes of its blocks, the chunk before it, and how often it was used; 2 is often."""

    parent: bytes | None
    hashes: tuple[bytes, ...]
    uses: int = 0


class HotPrefixes:
    """At most `limit` chunks by the hash at their end, the one used last at the end."""

    def __init__(self, limit: int = MAX_CHUNKS) -> None:
        self._limit = limit
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def use(self, hashes: Sequence[bytes], chunk_blocks: int) -> None:
        """A request has used these blocks, from the first on; what is no whole chunk doesn't count."""
        # The last chunk first, so that no chunk is forgotten before those that follow it.
        for end in range(len(hashes) // chunk_blocks * chunk_blocks, 0, -chunk_blocks):
            begin, key = end - chunk_blocks, hashes[end - 1]
            chunk = self._chunks.get(key)
            if chunk is None:
                parent = hashes[begin - 1] if begin else None
                chunk = self._chunks[key] = _Chunk(parent, tuple(hashes[begin:end]))
            chunk.uses = min(2, chunk.uses + 1)
            self._chunks.move_to_end(key)
        while len(self._chunks) > self._limit:
            self._chunks.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These chunks may be wrong."""
        for key in keys:
            self._chunks.pop(key, None)

    def clear(self) -> None:
        """Nothing that was used until now must come back."""
        self._chunks.clear()

    def encoded(self) -> bytes:
        """The list, most valuable first: (place of the parent in it or -1, hashes)."""
        latest = list(reversed(self._chunks.items()))
        ranked = sorted(latest, key=lambda item: -item[1].uses)
        places: dict[bytes, int] = {}
        rows: list[tuple[int, bytes]] = []
        for key, chunk in ranked:
            # What precedes a chunk was used at least as often and as late; it lacks only if it was forgotten.
            if chunk.parent is None or chunk.parent in places:
                places[key] = len(rows)
                rows.append((-1 if chunk.parent is None else places[chunk.parent], b"".join(chunk.hashes)))
        encode = require_msgspec("a list of prefixes").msgpack.encode
        text = encode(rows)
        return encode((VERSION, blake2b(text, digest_size=DIGEST_SIZE).digest(), text))


def decoded(payload: bytes | memoryview, chunk_blocks: int) -> list[tuple[bytes, ...]]:
    """Chains of block hashes of an encoded list, most valuable first, each from its start to a chunk that ends it.

    What one chain shares with an earlier one is in both. Raises ValueError if it isn't a list of this version.
    """
    msgspec = require_msgspec("a list of prefixes")
    try:
        version, digest, text = msgspec.msgpack.decode(payload, type=tuple[int, bytes, bytes])
        rows = msgspec.msgpack.decode(text, type=list[tuple[int, bytes]])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a list of prefixes: {error}") from error
    size = chunk_blocks * DIGEST_SIZE
    # A hash that was changed on its way would give a block to the wrong prompt.
    is_good = digest == blake2b(text, digest_size=DIGEST_SIZE).digest()
    is_good = is_good and all(len(text) == size and -1 <= parent < place for place, (parent, text) in enumerate(rows))
    if version != VERSION or not is_good:
        raise ValueError("not a list of prefixes of this version and chunk size")
    return [_split(chain) for chain in _chains(rows)]


def _chains(rows: Sequence[tuple[int, bytes]]) -> Iterator[bytes]:
    """The hashes from a start to an end, so that each row is in one of them."""
    most_valuable_child: dict[int, int] = {}
    for place, (parent, _) in enumerate(rows):
        most_valuable_child.setdefault(parent, place)
    is_planned = [False] * len(rows)
    for place in range(len(rows)):
        if is_planned[place]:
            continue
        at = place
        while at in most_valuable_child:
            at = most_valuable_child[at]
        chain: list[bytes] = []
        while at >= 0:
            is_planned[at] = True
            chain.append(rows[at][1])
            at = rows[at][0]
        yield b"".join(reversed(chain))


def _split(hashes: bytes) -> tuple[bytes, ...]:
    return tuple(hashes[begin : begin + DIGEST_SIZE] for begin in range(0, len(hashes), DIGEST_SIZE))
