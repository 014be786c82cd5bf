"""What every tier can do, and what it hands out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar, runtime_checkable

from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.stats import TierStats


class Lease:
    """A payload whose memory stays as it is until `release`, whatever happens to its chunk meanwhile.

    `payload` is read-only. A view made from it (a slice, a numpy array) keeps the memory too, so that a late reader
    never sees another chunk's bytes; the memory returns to the tier with the last of them. `header` is the chunk's
    header (`codec`) where the tier has it at hand: who passes the chunk on passes on the writer's checksum.
    """

    __slots__ = ("header", "payload")

    def __init__(self, payload: memoryview, header: bytes | None = None) -> None:
        self.payload = payload
        self.header = header

    def release(self) -> None:
        """Give the memory back. Calling it again does nothing; `payload` is unusable afterwards."""
        try:
            self.payload.release()
        except BufferError:
            # Somebody still reads through a view of it: that view's end is the lease's.
            self.payload = memoryview(b"")

    def __enter__(self) -> memoryview:
        return self.payload

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class Filling:
    """A tier's memory that a chunk is received into; it returns to the tier with the last reference to it.

    `keep` takes the chunk's header (`codec`), once it was checked against `buffer`, and makes it a chunk of the tier;
    nothing may be written from then on. True if the tier has the chunk.
    """

    buffer: memoryview
    keep: Callable[[bytes], bool]


@runtime_checkable
class FillableTier(Protocol):
    """A tier that can take a chunk without a copy."""

    def fill(
        self, key: ChunkKey, num_bytes: int, *, parent: ChunkKey | None = None, tenant: str = ""
    ) -> Filling | None:
        """Room for a payload of `num_bytes` that the tier doesn't have, or None if it would not be kept."""
        ...


Listener = Callable[[ChunkKey, bool], None]
"""Told of a chunk that came (True) or went (False), in the order in which it happened.

It runs with the tier's lock held: it must not call the tier, must not wait, must not raise.
"""


@runtime_checkable
class Observable(Protocol):
    """A tier that tells of each change of what it holds, evictions and expiry included."""

    listener: Listener | None


@runtime_checkable
class Indexed(Protocol):
    """A tier that knows about its chunks without reading them."""

    def payload_bytes(self, key: ChunkKey) -> int | None: ...
    def parent(self, key: ChunkKey) -> ChunkKey | None: ...


@runtime_checkable
class Pinning(Protocol):
    """A tier elsewhere that holds chunks for whoever asks, by name: other processes may prolong or end it."""

    def pin(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        """Hold chunks, instead of what the holder held; how many leading ones are there and held."""
        ...

    def extend(self, holder: str, seconds: float) -> bool:
        """Hold them for so long from now; False if the holder holds nothing."""
        ...

    def unpin(self, holder: str) -> bool:
        """Let go; False if the holder held nothing."""
        ...


Origin = tuple[ChunkKey | None, str]
"""The chunk before one in its chain, and the tenant that owns it: what it was put with."""


@runtime_checkable
class Traceable(Protocol):
    """A tier that remembers what its chunks were put with."""

    def origin(self, key: ChunkKey) -> Origin | None: ...


@runtime_checkable
class Promoting(Protocol):
    """A tier that keeps nearer copies of what it is asked for, if the caller says whose they are."""

    def lease_of(self, key: ChunkKey, origin: Origin, *, deadline: float | None = None) -> Lease | None:
        """As `lease`."""
        ...


_Layer = TypeVar("_Layer")


def layer(tier: object, kind: type[_Layer]) -> _Layer | None:
    """The tier itself or the one inside it (a wrapper's `tier`) that is of that kind, outermost first."""
    while not isinstance(tier, kind):
        tier = getattr(tier, "tier", None)
        if tier is None:
            return None
    return tier


class Tier(Protocol):
    """A bounded place for chunks that may forget anything at any time. Safe to call from several threads.

    No method raises for a fault of the place itself (I/O error, full disk, timeout): reads answer a miss, writes
    "not kept", and `stats.errors` counts. A ValueError is the caller's mistake.

    deadline: seconds after which the caller has no use for an answer; None: the tier's own limit. A tier that asks
    others gives up then; memory and disks answer when they can.
    """

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        """Keep a copy of `payload`; False if it was not kept. A refused put changes nothing.

        One key names one state: a tier that has the key may keep the bytes it has. `parent` is the chunk before this
        one in its chain (it is kept longer than what follows it); `tenant` owns the bytes. With `durable`, True means
        that the chunk survives the machine's crash.
        """
        ...

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        """The verified payload, read-only and valid as long as it is referenced, or None.

        A bad chunk is dropped, counted in `stats.corrupt`, and is a miss.
        """
        ...

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        """Copy the payload to the front of `target`; its bytes, or None for a miss (`target` may then be garbage).

        Payloads from outside this process are verified. ValueError if `target` is smaller than the payload.
        """
        ...

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        """The payload without a copy where the tier has it in memory, or None. Verified as in `read_into`."""
        ...

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        """How many leading keys are there, up to the first that is not: a prefix lookup. No promise that they stay."""
        ...

    def delete(self, key: ChunkKey) -> bool:
        """Forget a chunk; False if it was not there. After `flush` it stays forgotten across a restart."""
        ...

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        """Forget the chunks of that namespace and tenant (None: of any); how many there were."""
        ...

    def keys(self) -> Iterator[ChunkKey]:
        """The keys held, in no order. Changes meanwhile may or may not show."""
        ...

    def flush(self) -> bool:
        """Make every put and delete so far durable; False if that failed."""
        ...

    def close(self) -> None:
        """Give up files, connections and memory; chunks stay where the tier outlives the process. Idempotent."""
        ...

    @property
    def stats(self) -> TierStats:
        """A copy of the counts."""
        ...

    @property
    def bytes_used(self) -> int:
        """Bytes that count against `capacity`: all that chunks take, headers and padding included."""
        ...

    @property
    def capacity(self) -> int:
        """Bound on `bytes_used`, in bytes."""
        ...
