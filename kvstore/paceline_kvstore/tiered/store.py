"""The tiered store: one engine's or one node's view of memory, disk, node server and S3, in that order.

Calls that an engine makes between two steps (`lookup`, `fetch`, `offer`, `decide`, `pin`) do no I/O and wait for none.
A chunk goes to the first level at once and to a lower one when it is offered a second time or used after it was offered
(`SecondOffer`): by the time memory forgets it, it is there already. A chunk that is read from a lower level goes up.
Whatever is wrong with a level, its chunks are misses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from paceline_kvstore import codec
from paceline_kvstore.codec import Buffer
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.policy import reuse
from paceline_kvstore.policy.holds import Holds
from paceline_kvstore.policy.reuse import Decision, Prefill, Regret, ReuseMode
from paceline_kvstore.tiered.drain import Drain
from paceline_kvstore.tiered.fetch import Fetch
from paceline_kvstore.tiered.leases import LeaseCount
from paceline_kvstore.tiered.level import Level
from paceline_kvstore.tiered.lookup import Lookup, Plan, Planned
from paceline_kvstore.tiered.pool import Job
from paceline_kvstore.tiered.writes import Chunk, WriteBehind
from paceline_kvstore.tiers.base import Filling, Pinning, layer

PROBE_SECONDS = 2.0
"""How long a level may take to answer a lookup."""
FETCH_SECONDS = 30.0
PINS_MAX = 65_536
"""Keys that may be pinned, each counted once a holder."""
PIN_SECONDS_MAX = 3600.0
CLEAR_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """A chunk came to a level, or went from it."""

    level: str
    key: ChunkKey
    is_held: bool


class TieredStore:
    """Safe to call from several threads. `close` it: it has threads and tiers of its own.

    `on_event` is told of every change in a level, in the order in which that level made it. It runs with the level's
    lock held, so it must only take note. `pins` are shared with tiers that evict by them.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        *,
        mode: ReuseMode = ReuseMode.MEASURED,
        pins: Holds[ChunkKey] | None = None,
        on_event: Callable[[ChunkEvent], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [level.name for level in levels]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a store needs one or more levels of different names, not {names}")
        self.levels = tuple(levels)
        self.mode = mode
        self.leases = LeaseCount()
        self.writes = WriteBehind()
        self.pins: Holds[ChunkKey] = Holds(PINS_MAX) if pins is None else pins
        self.clock = clock
        self._lock = Lock()
        self._pinning = Lock()
        self._regret = Regret()
        self._takes_offers = True
        self._is_closed = False
        for level in levels:
            level.listen(_listener(level.name, on_event))

    def lookup(
        self, keys: Sequence[ChunkKey], bytes_per_token: int = 0, *, on_news: Callable[[], None] = lambda: None
    ) -> Lookup:
        """Which leading chunks there are, and where. `keys` is a chain from its start; bytes as in one rank's chunk.

        Levels with an index have answered when it returns; the others are asked in the background (`is_pending`), and
        `on_news` is called, in any thread, when one of them has answered.
        """
        self.expire()
        keys = tuple(keys) if self.mode is not ReuseMode.NEVER and not self._is_closed else ()
        known: list[Level] = []
        for key in keys:
            level = self._find(key)
            if level is None:
                break
            known.append(level)
        lookup = Lookup(keys, known, bytes_per_token, on_news)
        rest = keys[len(known) :]
        for level in self.levels:
            if rest and not level.options.is_indexed:
                lookup.ask(level, lambda answer, level=level: self._probe(level, rest, answer))
        return lookup

    def decide(
        self, plan: Plan, prefill: Prefill, num_tokens: int, *, deadline_s: float = FETCH_SECONDS, lookup_s: float = 0.0
    ) -> Decision:
        """How many leading chunks of the plan to load: see `reuse.decide`. Tell `record` what became of it."""
        return reuse.decide(
            [chunk.candidate for chunk in plan.chunks],
            {chunk.level.name: chunk.level.source() for chunk in plan.chunks},
            prefill,
            num_tokens,
            lookup_s=lookup_s,
            deadline_s=deadline_s,
            mode=self.mode,
        )

    def record(self, decision: Decision, load_s: float, num_tokens_loaded: int, prefill: Prefill) -> float:
        """What became of a decision: see `Regret.record`."""
        with self._lock:
            return self._regret.record(decision, load_s, num_tokens_loaded, prefill)

    @property
    def regret(self) -> Regret:
        """A copy of the counts."""
        with self._lock:
            return replace(self._regret)

    def fetch(
        self,
        plan: Plan,
        deadline_s: float = FETCH_SECONDS,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        on_news: Callable[[], None] = lambda: None,
    ) -> Fetch:
        """Load the plan's chunks. What is in memory is there when it returns; poll for the rest.

        deadline_s: from now; what is not there by then is not waited for. parent: the chunk before the plan's first.
        tenant: whose chunks they are, for the levels that get copies. on_news: called, in any thread and perhaps before
        this returns, when a chunk came or will not.
        """
        keys = [chunk.key for chunk in plan.chunks]
        fetch = Fetch(keys, self.clock() + deadline_s, self.leases, self.clock, on_news)
        for index, planned in enumerate(plan.chunks):
            if not fetch.wants(index):
                break
            before = keys[index - 1] if index else parent
            self._start_read(fetch, index, planned, Chunk(planned.key, memoryview(b""), before, tenant))
        return fetch

    def offer(self, key: ChunkKey, payload: Buffer, *, parent: ChunkKey | None = None, tenant: str = "") -> bool:
        """Keep the chunk behind the caller's back. `payload` must not change any more: hand over a copy.

        False if no level has it or will get it: the store is draining, or the queues are full. Never waits.
        """
        view = codec.as_bytes(payload)
        takers = self.takers(key, view.nbytes)
        if takers is None:
            self.levels[0].count(dropped=1)
            return False
        return self.take(takers, key, view, parent=parent, tenant=tenant) or self._find(key) is not None

    def takers(self, key: ChunkKey, num_bytes: int, promised: int = 0) -> tuple[Level, ...] | None:
        """The first half of an offer: the levels that lack the chunk and want it now, to be handed to `take`.

        promised: bytes that `take` will get before. So that nothing is copied for nobody. None, and the offer doesn't
        count, if only full queues keep it from being taken: offer it again later. A second offer that finds a queue
        full can be made again, too.
        """
        if not self._takes_offers:
            return ()
        self.expire()
        is_on_its_way = self.writes.find(key) is not None
        wanting = [
            level
            for level in self.levels
            if not level.has(key) and (level.options.needs_second_offer or not is_on_its_way)
        ]
        full = [level for level in wanting if not level.writes.has_room(num_bytes, promised)]
        if full == wanting and any(not level.options.needs_second_offer for level in full):
            return None
        for level in full:
            level.count(dropped=1)
        return tuple(level for level in wanting if level not in full and level.admits(key))

    def fill(
        self, takers: Sequence[Level], key: ChunkKey, num_bytes: int, parent: ChunkKey | None, tenant: str
    ) -> Filling | None:
        """The memory of the first of the takers, to write the payload into and hand to `take`; None if it has none."""
        return takers[0].fill(key, num_bytes, parent, tenant) if takers and takers[0].options.is_immediate else None

    def take(
        self,
        takers: Sequence[Level],
        key: ChunkKey,
        payload: Buffer,
        *,
        parent: ChunkKey | None = None,
        tenant: str = "",
        filling: Filling | None = None,
    ) -> bool:
        """The second half of an offer: write the chunk to these levels; whether one of them will get it.

        filling: of the first level, from `fill`, with the payload in its buffer: it is kept there without another copy.
        """
        chunk = Chunk(key, codec.as_bytes(payload).toreadonly(), parent, tenant)
        self.pins.arrived(key, chunk.payload.nbytes)
        if not self._takes_offers:
            return False
        is_kept = filling is not None and filling.keep(codec.encode_header(key, chunk.payload))
        rest = takers if filling is None else takers[1:]
        return sum(self.writes.submit(level, chunk) for level in rest) > 0 or is_kept

    def pin(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        """Keep chunks in memory and on disk for a while, those on their way too, instead of what the holder kept.

        How many leading keys that is: fewer than all where too many are kept, or too many bytes. A node server is told
        behind the caller's back (`flush` waits for it); in S3 nothing is evicted, its own time to live is enough.
        ValueError for seconds out of range.
        """
        if not 0 < seconds <= PIN_SECONDS_MAX:
            raise ValueError(f"a pin lasts for more than 0 and up to {PIN_SECONDS_MAX:.0f} seconds, not {seconds}")
        now = self.clock()
        count = self.pins.hold(holder, {key: self._payload_bytes(key) for key in keys}, now, now + seconds)
        self._pass_on(holder)
        return count

    def extend(self, holder: str, seconds: float) -> bool:
        """Let a pin last for so long from now; False if it had ended. ValueError for seconds out of range."""
        if not 0 < seconds <= PIN_SECONDS_MAX:
            raise ValueError(f"a pin lasts for more than 0 and up to {PIN_SECONDS_MAX:.0f} seconds, not {seconds}")
        now = self.clock()
        was_held = self.pins.extend(holder, now, now + seconds)
        self._pass_on(holder)
        return was_held

    def unpin(self, holder: str) -> bool:
        """End a pin; False if it had ended already."""
        was_held = self.pins.release(holder)
        self._pass_on(holder)
        return was_held

    def delete(self, key: ChunkKey) -> bool:
        """Forget a chunk everywhere; whether it was anywhere. Waits for the levels."""
        withdrawn = self.writes.withdraw(lambda chunk: chunk.key == key, time.monotonic() + CLEAR_SECONDS)
        self.pins.discard([key])
        return withdrawn + sum(level.delete(key) for level in self.levels) > 0

    def clear(self, *, namespace: bytes | None = None, tenant: str | None = None) -> int:
        """Forget the chunks of that namespace and tenant (None: any); how many copies there were. Waits.

        What was being read meanwhile is not written again.
        """

        def is_meant(chunk: Chunk) -> bool:
            return namespace in (None, chunk.key.namespace) and tenant in (None, chunk.tenant)

        self.writes.withdraw(is_meant, time.monotonic() + CLEAR_SECONDS)
        pinned = [key for key in self.pins.keys(self.clock()) if self._find(key) is not None]
        count = sum(level.clear(namespace, tenant) for level in self.levels)
        self._forget_pins(pinned)
        return count

    def keys(self) -> Iterator[ChunkKey]:
        """The keys held anywhere, each once, in no order. Waits for levels that must be asked."""
        seen: set[ChunkKey] = set()
        for level in self.levels:
            fresh = set(level.tier.keys()) - seen
            seen |= fresh
            yield from fresh

    def flush(self, seconds: float = FETCH_SECONDS) -> bool:
        """Wait until what was taken is in its levels and durable where they are; False if it is not in that time."""
        return Drain(self.levels).flush(time.monotonic() + seconds)

    def drain(self, seconds: float = FETCH_SECONDS) -> bool:
        """Take no more offers, and write what only memory has to the first durable level; whether all is there."""
        self._takes_offers = False
        return Drain(self.levels).run(time.monotonic() + seconds)

    def close(self, seconds: float = 5.0) -> bool:
        """Stop. What waits to be written is dropped: `flush` or `drain` before. False if a thread still hangs."""
        with self._lock:
            if self._is_closed:
                return True
            self._is_closed = True
        self._takes_offers = False
        until = time.monotonic() + seconds
        return sum(level.close(until) for level in self.levels) == len(self.levels)

    def check_integrity(self) -> None:
        """Raise ValueError unless queues, quotas and leases add up."""
        self.writes.check_integrity()
        if self.leases.num < 0 or (not self.leases.num and self.leases.num_bytes):
            raise ValueError(f"{self.leases.num} leases of {self.leases.num_bytes} bytes are out")
        for level in self.levels:
            level.reads.check_integrity()
            level.writes.check_integrity()
            level.tenants.check_integrity()

    def spread(self, source: Level, chunk: Chunk, epoch: int | None = None) -> None:
        """A chunk that was used goes up, and down as by an offer. epoch: `writes.epoch` from before it was read."""
        is_above = True
        for level in self.levels if self._takes_offers else ():
            if level is source:
                is_above = False
            elif not level.has(chunk.key) and level.admits(chunk.key):
                view = replace(chunk, payload=memoryview(chunk.payload))
                self.pins.arrived(chunk.key, view.payload.nbytes)
                if self.writes.submit(level, view, epoch):
                    level.count(**{"promoted" if is_above else "demoted": 1})

    def expire(self) -> None:
        """Delete the chunks whose time is over. Quick while there are none."""
        for level in self.levels:
            old = level.expire()
            if old:
                self._forget_pins(old)

    def _find(self, key: ChunkKey) -> Level | None:
        """The first level that has the chunk, as far as is known at once; one on its way is as good as in the first."""
        if self.writes.find(key) is not None:
            return self.levels[0]
        indexed = (level for level in self.levels if level.options.is_indexed)
        return next((level for level in indexed if level.has(key) and not level.is_stuck), None)

    def _probe(self, level: Level, keys: Sequence[ChunkKey], answer: Callable[[int], None]) -> bool:
        job = Job(lambda: answer(level.probe(keys, PROBE_SECONDS)), lambda: answer(0), 0)
        if not level.is_stuck and level.reads.submit(job):
            return True
        level.count(probes_refused=1)
        return False

    def _start_read(self, fetch: Fetch, index: int, planned: Planned, chunk: Chunk) -> None:
        """Deliver at once what is in memory, else have a reader of the level deliver it."""
        staged = self.writes.find(planned.key)
        if staged is not None:
            fetch.deliver(index, staged, self.levels[0].name)
            return
        level, epoch = planned.level, self.writes.epoch
        if level.options.is_immediate:
            payload = level.read(planned.key, 0.0)
            if payload is not None:
                fetch.deliver(index, payload, level.name)
                self.spread(level, replace(chunk, payload=payload), epoch)
                return
            # It went since the lookup: perhaps down.
            below = self._find(planned.key)
            if below is None or below.options.is_immediate:
                fetch.deliver(index, None)
                return
            level = below
        job = Job(
            lambda: self._read(fetch, index, level, chunk, epoch),
            lambda: _nothing(fetch.deliver(index, None)),
            planned.num_bytes,
        )
        if not level.reads.submit(job):
            fetch.deliver(index, None)

    def _read(self, fetch: Fetch, index: int, level: Level, chunk: Chunk, epoch: int) -> None:
        """In a reader's thread."""
        if not fetch.wants(index):
            return
        origin = chunk.parent, chunk.tenant
        payload = level.read(chunk.key, fetch.until - self.clock(), origin)
        if payload is None:
            other = self._find(chunk.key)
            if other is not None and other is not level:
                level, payload = other, other.read(chunk.key, fetch.until - self.clock(), origin)
        if not fetch.deliver(index, payload, level.name) and payload is not None:
            level.count(late=1)
        if payload is not None:
            self.spread(level, replace(chunk, payload=payload), epoch)

    def _payload_bytes(self, key: ChunkKey) -> int:
        """Size of a chunk that is in memory, on disk or on its way; 0 where it is not known."""
        staged = self.writes.find(key)
        if staged is not None:
            return staged.nbytes
        return next((size for level in self.levels if (size := level.payload_bytes(key)) is not None), 0)

    def _pass_on(self, holder: str) -> None:
        """Have the tiers that hold chunks for others do as this store does."""
        for level in self.levels:
            tier = layer(level.tier, Pinning)
            if tier is None:
                continue
            job = Job(lambda tier=tier: self._tell(tier, holder), lambda: None, 0)
            if not level.writes.submit(job):
                level.count(dropped=1)

    def _tell(self, tier: Pinning, holder: str) -> None:
        # What holds now, not when the job was made: whoever comes last has the last word.
        with self._pinning:
            now = self.clock()
            held = self.pins.of(holder, now)
            if held is None:
                tier.unpin(holder)
            else:
                tier.pin(holder, held.keys, held.until - now)

    def _forget_pins(self, keys: Sequence[ChunkKey]) -> None:
        """Of chunks that are gone."""
        gone = [key for key in keys if self._find(key) is None]
        if gone:
            self.pins.discard(gone)


def _listener(name: str, on_event: Callable[[ChunkEvent], None] | None) -> Callable[[ChunkKey, bool], None] | None:
    return None if on_event is None else lambda key, is_held: on_event(ChunkEvent(name, key, is_held))


def _nothing(_: object) -> None:
    """A call whose answer is of no use."""
