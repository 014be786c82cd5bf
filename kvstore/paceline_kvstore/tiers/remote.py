"""The node server as a tier: what other engines of the node keep, over a few connections.

Whatever is wrong with the server or the way to it is a miss or "not kept", soon, and counts in `stats.errors`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from paceline_kvstore import codec
from paceline_kvstore.arena import Arena
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.remote.link import Link, Refused
from paceline_kvstore.remote.pool import Backoff, LinkPool
from paceline_kvstore.remote.race import Race
from paceline_kvstore.stats import TierStats
from paceline_kvstore.tiers.base import Lease, Origin
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire.address import Address
from paceline_kvstore.wire.frames import ProtocolError
from paceline_kvstore.wire.tls import ClientTls
from paceline_kvstore.wire.transport import Slow

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_ANY_SIZE = 2**63
AHEAD = 4
"""Gets sent ahead by `read_many`: enough that the server never waits for the next one."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Times in seconds. Reads never wait for writes: each kind has connections of its own.

    read_deadline: for one call of get, read_into, lease or contains, and write_deadline for one of any other, from
    first to last byte and reconnecting included. staging_bytes: reused memory for payloads that were asked for without
    a buffer; more of them at once get memory of their own. tls: None speaks without it. hedge_share: of get, read_into
    and lease, how many may be asked for a second time because the first answer is late.
    """

    token: str = ""
    tls: ClientTls | None = None
    read_connections: int = 4
    write_connections: int = 2
    read_deadline: float = 5.0
    write_deadline: float = 30.0
    backoff: float = 0.05
    backoff_max: float = 2.0
    staging_bytes: int = 64 << 20
    hedge_share: float = 0.03


@dataclass(frozen=True, slots=True)
class _Found:
    """A chunk that was asked for: its bytes, or that they don't fit."""

    size: int
    payload: memoryview | None


class RemoteTier:
    """Implements `Tier`. Safe to call from several threads; a call may take a deadline of its own."""

    def __init__(self, address: Address, options: RemoteOptions | None = None) -> None:
        self.address = address
        self.quarantine = Quarantine()
        self._options = options = options or RemoteOptions()
        self._hello = msg.Hello(options.token)
        # One for both pools: they lead to the same server.
        backoff = Backoff(options.backoff, options.backoff_max)
        self._reads = LinkPool(options.read_connections, self._connect, backoff)
        self._writes = LinkPool(options.write_connections, self._connect, backoff)
        self.race = Race(self._reads, options.hedge_share)
        self._staging = Arena(options.staging_bytes)
        self._lock = Lock()
        self._stats = TierStats()
        self._bytes_used = self._capacity = 0
        self._closed = False

    @property
    def stats(self) -> TierStats:
        """What this client saw."""
        with self._lock:
            return replace(self._stats)

    @property
    def bytes_used(self) -> int:
        """The server's, as of now; the last known while it can't be reached."""
        self._refresh()
        return self._bytes_used

    @property
    def capacity(self) -> int:
        """The server's; 0 until it was reached."""
        if not self._capacity:
            self._refresh()
        return self._capacity

    def put(
        self,
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        durable: bool = False,
    ) -> bool:
        if len(tenant.encode()) > msg.TENANT_BYTES_MAX:
            raise ValueError(f"a tenant's name has at most {msg.TENANT_BYTES_MAX} bytes, not {len(tenant.encode())}")
        request = msg.Put(key, parent, tenant, durable)
        kept = self._call(self._writes, self._options.write_deadline, self._put, codec.as_bytes(payload), request)
        self._count(puts=int(bool(kept)), refused=int(not kept))
        return bool(kept)

    def get(self, key: ChunkKey, *, deadline: float | None = None) -> memoryview | None:
        lease = self._lease(key, None, deadline)
        return None if lease is None else lease.payload

    def read_into(self, key: ChunkKey, target: bytearray | memoryview, *, deadline: float | None = None) -> int | None:
        view = codec.as_bytes(target)
        found = self._read(key, view, None, deadline)
        if found is not None and found.payload is None:
            raise ValueError(f"the payload has {found.size} bytes, the buffer {len(view)}")
        return None if found is None else found.size

    def lease(self, key: ChunkKey, *, deadline: float | None = None) -> Lease | None:
        return self._lease(key, None, deadline)

    def lease_of(self, key: ChunkKey, origin: Origin, *, deadline: float | None = None) -> Lease | None:
        """Implements `Promoting`: the server keeps in memory what it had to read from disk or S3."""
        return self._lease(key, origin, deadline)

    def read_many(
        self, wanted: Sequence[tuple[ChunkKey, bytearray | memoryview]], *, deadline: float | None = None
    ) -> int:
        """`read_into` for a chain of chunks, each into its own buffer, with requests sent ahead of their answers.

        How many leading ones were read; what is in the other buffers means nothing. ValueError if a buffer is smaller
        than its payload.
        """
        targets = [(key, codec.as_bytes(target)) for key, target in wanted]
        seconds = self._options.read_deadline if deadline is None else deadline
        found = self._call(self._reads, seconds, self._fetch_many, targets) or [None] * len(targets)
        hits = sum(each is not None for each in found)
        self._count(hits=hits, misses=len(found) - hits)
        count = next((index for index, each in enumerate(found) if each is None), len(found))
        for each, (_, view) in zip(found[:count], targets, strict=False):
            if each is not None and each.payload is None:
                raise ValueError(f"the payload has {each.size} bytes, the buffer {len(view)}")
        return count

    def contains(self, keys: Sequence[ChunkKey], *, deadline: float | None = None) -> int:
        seconds = self._options.read_deadline if deadline is None else deadline
        end = time.monotonic() + seconds
        total = 0
        for at in range(0, len(keys), msg.KEYS_MAX):
            part = tuple(keys[at : at + msg.KEYS_MAX])
            count = self._ask(self._reads, end - time.monotonic(), msg.Contains(part, _milliseconds(end)))
            total += min(len(part), count)
            if count < len(part):
                break
        return total

    def pin(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        """Have the server hold chunks, those that come later too, instead of what the holder held.

        How many leading ones are there and held; 0 as well if the server can't be reached. A pin ends with its time or
        with `unpin`, whoever calls that. ValueError for too many keys or a name that is too long.
        """
        if len(keys) > msg.KEYS_MAX:
            raise ValueError(f"a pin has at most {msg.KEYS_MAX} keys, not {len(keys)}")
        request = msg.Pin(_holder(holder), tuple(keys), int(seconds * 1000))
        return self._ask(self._writes, self._options.write_deadline, request)

    def extend(self, holder: str, seconds: float) -> bool:
        """Hold what the holder holds for so long from now; False if it holds nothing, or nobody answers."""
        request = msg.Extend(_holder(holder), int(seconds * 1000))
        return bool(self._ask(self._writes, self._options.write_deadline, request))

    def unpin(self, holder: str) -> bool:
        """Let go of what the holder holds; False if it held nothing, or nobody answers."""
        return bool(self._ask(self._writes, self._options.write_deadline, msg.Unpin(_holder(holder))))

    def delete(self, key: ChunkKey) -> bool:
        return bool(self._ask(self._writes, self._options.write_deadline, msg.Delete(key)))

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        return self._ask(self._writes, self._options.write_deadline, msg.Clear(namespace, tenant))

    def keys(self) -> Iterator[ChunkKey]:
        return iter(self._call(self._writes, self._options.write_deadline, self._list_keys) or [])

    def flush(self) -> bool:
        return bool(self._ask(self._writes, self._options.write_deadline, msg.Flush()))

    def close(self) -> None:
        """Leave the server; what it holds stays. Payloads that were handed out stay readable."""
        self._closed = True
        self._reads.close()
        self._writes.close()

    def _connect(self, deadline: float) -> Link:
        link = Link(self.address, self._hello, deadline, self._options.tls)
        self._capacity = link.capacity
        return link

    def _lease(self, key: ChunkKey, origin: Origin | None, deadline: float | None) -> Lease | None:
        found = self._read(key, None, origin, deadline)
        return None if found is None or found.payload is None else Lease(found.payload.toreadonly())

    def _read(
        self, key: ChunkKey, target: memoryview | None, origin: Origin | None, deadline: float | None
    ) -> _Found | None:
        seconds = self._options.read_deadline if deadline is None else deadline
        found = self._call(self._reads, seconds, self._fetch, key, target, origin or (None, None))
        with self._lock:
            self._stats.hits += found is not None
            self._stats.misses += found is None
        return found

    def _fetch(
        self,
        link: Link,
        end: float,
        key: ChunkKey,
        target: memoryview | None,
        origin: tuple[ChunkKey | None, str | None],
    ) -> _Found | None:
        request = msg.Get(key, _ANY_SIZE if target is None else len(target), _milliseconds(end), *origin)
        first = self.race.ask(link, request, end)
        if first is link:
            return self._receive(link, end, key, target)
        try:
            found = self._receive(first, end, key, target)
        except BaseException:
            self._reads.discard(first)
            raise
        self._reads.give_back(first)
        return found

    def _fetch_many(self, link: Link, end: float, wanted: Sequence[tuple[ChunkKey, memoryview]]) -> list[_Found | None]:
        found: list[_Found | None] = []
        posted = 0
        for key, target in wanted:
            for ahead, room in wanted[posted : len(found) + AHEAD]:
                link.post(msg.Get(ahead, len(room), _milliseconds(end)), end)
                posted += 1
            found.append(self._receive(link, end, key, target))
        return found

    def _receive(self, link: Link, end: float, key: ChunkKey, target: memoryview | None) -> _Found | None:
        """The answer to a get, verified."""
        reply, head = link.collect(end)
        match reply:
            case msg.Miss():
                return None
            case msg.TooLarge(size):
                return _Found(size, None)
            case msg.Hit():
                size = head.payload_bytes - codec.HEADER_BYTES
                if not 0 <= size <= (_ANY_SIZE if target is None else len(target)):
                    raise ProtocolError(f"a hit has {head.payload_bytes} bytes of payload")
            case _:
                raise ProtocolError(f"the server answers a get with {type(reply).__name__}")
        payload = self._memory(size) if target is None else target[:size]
        try:
            link.receive(key, payload, end)
        except KVStoreError as error:
            self._refuse(key, error)
            return None
        return _Found(size, payload)

    def _refuse(self, key: ChunkKey, error: KVStoreError) -> None:
        """Count a bad chunk and have the server drop it, or everybody would fetch it again."""
        self.quarantine.add(key, str(self.address), error)
        self._count(corrupt=1)
        self.delete(key)

    def _memory(self, size: int) -> memoryview:
        extent = self._staging.take(size) if size <= self._staging.size else None
        return np.empty(size, dtype=np.uint8).data if extent is None else extent.data

    def _put(self, link: Link, end: float, payload: memoryview, request: msg.Put) -> bool:
        if codec.encoded_size(len(payload)) > link.chunk_bytes_max:
            return False
        return bool(self._number(link.put(request, payload, end)))

    def _list_keys(self, link: Link, end: float) -> list[ChunkKey]:
        found: list[ChunkKey] = []
        more = True
        while more:
            reply, _ = link.ask(msg.Keys(restart=not found), end)
            if not isinstance(reply, msg.KeyPage):
                raise ProtocolError(f"the server answers keys with {type(reply).__name__}")
            found += reply.keys
            more = reply.more and bool(reply.keys)
        return found

    def _ask(self, pool: LinkPool, seconds: float, request: msg.Request) -> int:
        """The number that the server answers, 0 if it can't."""

        def ask(link: Link, end: float) -> int:
            return self._number(link.ask(request, end)[0])

        return self._call(pool, seconds, ask) or 0

    @staticmethod
    def _number(reply: msg.Reply) -> int:
        if not isinstance(reply, msg.Count):
            raise ProtocolError(f"the server answers with {type(reply).__name__} where a count is due")
        return reply.number

    def _refresh(self) -> None:
        def ask(link: Link, end: float) -> msg.StatsReply:
            reply, _ = link.ask(msg.Stats(), end)
            if not isinstance(reply, msg.StatsReply):
                raise ProtocolError(f"the server answers stats with {type(reply).__name__}")
            return reply

        reply = self._call(self._reads, self._options.read_deadline, ask)
        if reply is not None:
            self._bytes_used, self._capacity = reply.bytes_used, reply.capacity

    def _call(
        self,
        pool: LinkPool,
        seconds: float,
        action: Callable[Concatenate[Link, float, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T | None:
        """The action's answer within so many seconds, or None. A connection that died idle is replaced once."""
        if self._closed:
            return None
        end = time.monotonic() + seconds
        for is_last in (False, True):
            try:
                link = pool.take(end)
            except (OSError, KVStoreError) as error:
                return self._fault(error)
            try:
                answer = action(link, end, *args, **kwargs)
            except (ConnectionError, Refused) as error:
                pool.drop(link)
                if is_last or not link.used:
                    return self._fault(error)
            except (OSError, KVStoreError) as error:
                pool.drop(link)
                return self._fault(error)
            except BaseException:
                pool.drop(link)
                raise
            else:
                (pool.discard if link.is_outrun else pool.give_back)(link)
                return answer
        return None

    def _fault(self, error: Exception) -> None:
        self._count(errors=1)
        logger.log(logging.DEBUG if isinstance(error, Slow) else logging.INFO, "%s: %s", self.address, error)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)


def _milliseconds(end: float) -> int:
    """What is left until then."""
    return max(0, int((end - time.monotonic()) * 1000))


def _holder(name: str) -> str:
    if not 0 < len(name.encode()) <= msg.HOLDER_BYTES_MAX:
        raise ValueError(f"a holder's name has 1 to {msg.HOLDER_BYTES_MAX} bytes, not {len(name.encode())}")
    return name
