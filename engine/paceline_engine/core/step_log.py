"""A bounded log of what a scheduler was told and decided, and its replay without a model.

A segment begins with the scheduler's whole state, so however long the engine has run, the log is complete in itself:
`replay` drives a scheduler made from that state through the same calls and compares each plan. Two segments are kept,
so that at least one whole one is there when the newer has just begun. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from paceline_engine.core.kv_manager import SequenceStore
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core.request import Request
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.state import SchedulerState
from paceline_engine.core.stored_kv import Arrived, ChunkLoad, StoredKV, Wanted
from paceline_engine.messages import AddRequest
from paceline_engine.records import Struct, require_msgspec

# Of one segment: tokens in its plans and prompts, and ENTRY_WEIGHT for each request in a plan. About 8 MB.
MAX_WEIGHT = 400_000
ENTRY_WEIGHT = 16
BYTES_A_WEIGHT = 20


class Added(Struct, frozen=True, tag="add"):
    """A request arrived."""

    message: AddRequest
    now: float


class Aborted(Struct, frozen=True, tag="abort"):
    """A request was ended from outside."""

    request_id: str


class Commanded(Struct, frozen=True, tag="command"):
    """Something changed between two steps. name and value: of an adapter."""

    what: Literal["reset_prefix_cache", "sleep", "wake", "set_adapter", "remove_adapter"]
    name: str = ""
    value: str = ""


class Planned(Struct, frozen=True, tag="plan"):
    """A step was planned: when, and what stores answered meanwhile. ahead: on top of one that wasn't booked yet.

    stored: by the store of preempted sequences. found, arrived: lookups and loads of stored prefixes.
    """

    now: float
    plan: StepPlan
    stored: tuple[int, ...]
    ahead: bool
    found: tuple[int | None, ...] = ()
    arrived: tuple[Arrived, ...] = ()


class Updated(Struct, frozen=True, tag="update"):
    """The oldest plan that wasn't booked yet was: the device's results, when, and what they took."""

    results: tuple[StepResult, ...]
    end: float
    seconds: float


Entry = Added | Aborted | Commanded | Planned | Updated


class Segment(Struct, kw_only=True):
    """A state and everything that happened since, oldest first."""

    state: SchedulerState
    entries: list[Entry] = []
    weight: int = 0


class Difference(Struct, frozen=True, kw_only=True):
    """The first step of a segment that a replay planned otherwise."""

    step: int
    recorded: StepPlan
    replayed: StepPlan


class RecordingStore:
    """A store whose answers are noted, since a replay has no KV to ask about."""

    def __init__(self, store: SequenceStore) -> None:
        self._store = store
        self._answers: list[int] = []

    def save(self, request: Request) -> int:
        """As the store."""
        self._answers.append(self._store.save(request))
        return self._answers[-1]

    def load(self, request: Request, num_tokens: int, start: int = 0) -> int:
        """As the store."""
        self._answers.append(self._store.load(request, num_tokens, start))
        return self._answers[-1]

    def drop(self, request: Request) -> None:
        """As the store."""
        self._store.drop(request)

    def clear(self) -> None:
        """As the store."""
        self._store.clear()

    def take_answers(self) -> tuple[int, ...]:
        """What `save` and `load` returned since the last call, in order."""
        answers, self._answers = tuple(self._answers), []
        return answers


class RecordingPrefixes:
    """Stored prefixes whose answers are noted, as those of `RecordingStore`."""

    def __init__(self, store: StoredKV) -> None:
        self._store = store
        self._found: list[int | None] = []
        self._arrived: tuple[Arrived, ...] = ()

    def find(self, wanted: Wanted) -> int | None:
        """As the store."""
        self._found.append(self._store.find(wanted))
        return self._found[-1]

    def begin(self, load: ChunkLoad) -> None:
        """As the store."""
        self._store.begin(load)

    def poll(self) -> Sequence[Arrived]:
        """As the store."""
        self._arrived = tuple(self._store.poll())
        return self._arrived

    def cancel(self, request_id: str) -> None:
        """As the store."""
        self._store.cancel(request_id)

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        """As the store. No plan depends on the answer, so it isn't noted."""
        return self._store.offer(key, parent, block_ids, tenant)

    def forget(self, keys: Sequence[bytes]) -> None:
        """As the store."""
        self._store.forget(keys)

    def clear(self) -> None:
        """As the store."""
        self._store.clear()

    def take_answers(self) -> tuple[tuple[int | None, ...], tuple[Arrived, ...]]:
        """What `find` and `poll` returned since the last call; `poll` is called once a step."""
        answers, self._found = (tuple(self._found), self._arrived), []
        return answers


class _PrefixAnswers:
    """Stored prefixes that give a recording's answers again."""

    def __init__(self) -> None:
        self.found: deque[int | None] = deque()
        self.arrived: tuple[Arrived, ...] = ()

    def find(self, wanted: Wanted) -> int | None:
        return self.found.popleft() if self.found else 0

    def begin(self, load: ChunkLoad) -> None:
        pass

    def poll(self) -> Sequence[Arrived]:
        return self.arrived

    def cancel(self, request_id: str) -> None:
        pass

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        pass

    def clear(self) -> None:
        pass


class _Answers:
    """A store that gives a recording's answers again."""

    def __init__(self) -> None:
        self.answers: deque[int] = deque()

    def save(self, request: Request) -> int:
        return self.answers.popleft() if self.answers else 0

    def load(self, request: Request, num_tokens: int, start: int = 0) -> int:
        return self.answers.popleft() if self.answers else 0

    def drop(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


class StepLog:
    """The last one to two segments. Call `begin` with nothing in flight if `is_full`, then one method an event."""

    def __init__(self, scheduler: Scheduler, store: RecordingStore | None = None, max_weight: int = MAX_WEIGHT) -> None:
        self._scheduler = scheduler
        self._store = store
        self._max_weight = max_weight
        self._segments: deque[Segment] = deque(maxlen=2)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Older first."""
        return tuple(self._segments)

    @property
    def is_full(self) -> bool:
        """Whether a new segment is due."""
        return not self._segments or self._segments[-1].weight >= self._max_weight

    def begin(self) -> None:
        """Between two steps, with no plan in flight: begin a new segment if the last is full."""
        if self.is_full:
            self._segments.append(Segment(state=self._scheduler.state(), entries=[]))

    def _note(self, entry: Entry, weight: int) -> None:
        self._segments[-1].entries.append(entry)
        self._segments[-1].weight += weight

    def added(self, message: AddRequest, now: float) -> None:
        """A request arrived."""
        self._note(Added(message, now), ENTRY_WEIGHT + len(message.prompt_token_ids))

    def aborted(self, request_id: str) -> None:
        """A request was ended from outside."""
        self._note(Aborted(request_id), ENTRY_WEIGHT)

    def commanded(self, command: Commanded) -> None:
        """Something changed between two steps."""
        self._note(command, ENTRY_WEIGHT)

    def planned(self, now: float, plan: StepPlan, ahead: bool = False) -> None:
        """A step was planned."""
        stored = self._store.take_answers() if self._store is not None else ()
        prefixes = self._scheduler.kv.stored
        recorder = prefixes.store if prefixes is not None else None
        found, arrived = recorder.take_answers() if isinstance(recorder, RecordingPrefixes) else ((), ())
        weight = ENTRY_WEIGHT * (1 + len(plan.scheduled)) + plan.num_tokens
        weight += sum(len(admitted.token_ids) for admitted in plan.admitted)
        weight += ENTRY_WEIGHT * len(arrived)
        self._note(Planned(now, plan, stored, ahead, found, arrived), weight)

    def updated(self, results: tuple[StepResult, ...], end: float, seconds: float = 0.0) -> None:
        """The oldest plan that wasn't booked yet was."""
        self._note(Updated(results, end, seconds), sum(len(result.embedding) for result in results) // BYTES_A_WEIGHT)

    def encoded(self) -> bytes:
        """The segments as MessagePack, for `decoded`."""
        return require_msgspec("a step log").msgpack.encode(self.segments)


def decoded(log: bytes) -> list[Segment]:
    """Segments of an encoded log. Raises ValueError if it isn't one."""
    msgspec = require_msgspec("a step log")
    try:
        return msgspec.msgpack.decode(log, type=list[Segment])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a step log of this version: {error}") from error


def replay(segment: Segment) -> Difference | None:
    """Drive a scheduler through a segment; the first plan that isn't the recorded one, or None."""
    store, prefixes = _Answers(), _PrefixAnswers()
    scheduler = Scheduler.from_state(segment.state, store, prefixes)
    unbooked: deque[StepPlan] = deque()
    num_steps = 0
    for entry in segment.entries:
        match entry:
            case Added():
                scheduler.add(entry.message, entry.now)
            case Aborted():
                scheduler.abort(entry.request_id)
            case Commanded():
                _repeat(scheduler, entry)
            case Planned():
                store.answers = deque(entry.stored)
                prefixes.found, prefixes.arrived = deque(entry.found), entry.arrived
                plan = scheduler.schedule(entry.now, unbooked[-1] if entry.ahead else None)
                if plan != entry.plan:
                    return Difference(step=num_steps, recorded=entry.plan, replayed=plan)
                unbooked.append(plan)
                num_steps += 1
            case Updated():
                plan = unbooked.popleft()
                later = unbooked[0] if unbooked else None
                scheduler.update(plan, entry.results, entry.end, entry.seconds, later)
    return None


def _repeat(scheduler: Scheduler, command: Commanded) -> None:
    match command.what:
        case "reset_prefix_cache":
            scheduler.reset_prefix_cache()
        case "sleep":
            scheduler.sleep()
        case "wake":
            scheduler.wake()
        case "set_adapter":
            scheduler.arrivals.set_adapter(command.name, command.value)
        case "remove_adapter":
            scheduler.arrivals.remove_adapter(command.name)
