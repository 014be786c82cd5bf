"""Hand-offs between two engines: what is lent, what is honoured, and that every lease ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest

from paceline_engine.core.handoffs import OUTCOMES
from paceline_engine.core.stored_kv import Wanted
from paceline_engine.handoffs import Handoffs, open_handoffs
from paceline_engine.kv_borrower import BorrowedPrefixes
from paceline_engine.messages import AddRequest, Handoff, RequestOutput, SamplingParams
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.store import TieredStore
from paceline_kvstore.tiers import MemoryTier

NAMESPACE = bytes.fromhex("ab" * 32)
TOKENS, BYTES = 32, 4096
SECONDS = 10.0


class Place(MemoryTier):
    """A tier that several engines reach, with leases.

    Puts wait for `gate`, lookups of leases for `lookups`; nobody answers if `is_dead`.
    """

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.held: dict[str, tuple[tuple[ChunkKey, ...], float]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.lookups = threading.Event()
        self.lookups.set()
        self.is_dead = False

    def put(self, key: ChunkKey, payload: Any, **options: Any) -> bool:
        assert self.gate.wait(SECONDS)
        return not self.is_dead and super().put(key, payload, **options)

    def contains(self, keys: Sequence[ChunkKey], **options: Any) -> int:
        return 0 if self.is_dead else super().contains(keys)

    def pin(self, holder: str, keys: Sequence[ChunkKey], seconds: float) -> int:
        count = self.contains(keys)
        if count:
            self.held[holder] = tuple(keys[:count]), time.monotonic() + seconds
        return count

    def extend(self, holder: str, seconds: float) -> bool:
        assert self.lookups.wait(SECONDS)
        if self.is_dead or holder not in self.leases():
            return False
        self.held[holder] = self.held[holder][0], time.monotonic() + seconds
        return True

    def unpin(self, holder: str) -> bool:
        return not self.is_dead and self.held.pop(holder, None) is not None

    def leases(self) -> set[str]:
        """Holders whose time isn't over."""
        return {holder for holder, (_, until) in self.held.items() if until > time.monotonic()}


class Copier:
    """KV whose bytes say which blocks they are of."""

    def num_bytes(self, num_tokens: int) -> int:
        return BYTES

    def read_later(self, block_ids: Sequence[int], num_tokens: int) -> Callable[[], bytes]:
        content = bytes(block_ids) * (BYTES // len(block_ids))
        return lambda: content


class Store:
    """Has every chunk, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find(self, wanted: Wanted) -> int | None:
        self.asked.append(wanted.request_id)
        return len(wanted.chain)


def wanted(request_id: str, *, may_wait: bool = True) -> Wanted:
    return Wanted(
        request_id=request_id, chain=chain(3), first=0, num_tokens=100, tokens_per_s=1.0, queue_s=0.0, deadline_s=9.0,
        may_wait=may_wait, tenant="",
    )  # fmt: skip


def engine(stack: ExitStack, place: Place, **options: Any) -> Handoffs:
    """With the place as a level of its store, as a node server would be."""
    store = TieredStore([Level(place, LevelOptions(name="node", is_indexed=False, is_shared=True))])
    made = open_handoffs(store, Copier(), options.pop("namespace", NAMESPACE), TOKENS, **options)
    stack.callback(made.close)
    return made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def until(what: str, condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.001)
    raise AssertionError(f"not in time: {what}")


def chain(count: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed, index]) * 16 for index in range(count)]


def end_of(request_id: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, new_token_ids=(7,), finish_reason="length")


def answers(handoffs: Handoffs, *outputs: RequestOutput) -> list[RequestOutput]:
    """What comes of these outputs, once all of them can be sent."""
    found = handoffs.settled(outputs, is_last=False)
    until("settled", lambda: found.extend(handoffs.settled((), is_last=False)) or len(found) >= len(outputs))
    return found


def lend(handoffs: Handoffs, request_id: str = "a", num_chunks: int = 3, seed: int = 0) -> Handoff | None:
    assert handoffs.lender is not None
    links = chain(num_chunks, seed)
    handoffs.lender.lend(request_id, links, range(2 * num_chunks), SECONDS)
    (answer,) = answers(handoffs, end_of(request_id))
    assert (answer.new_token_ids, answer.finish_reason) == ((7,), "length")
    return answer.handoff


def take_over(handoffs: Handoffs, handoff: Handoff, request_id: str = "b") -> bool:
    """Whether the store is asked about a request that comes with the hand-off."""
    sampling = SamplingParams(max_tokens=1)
    handoffs.arrived(AddRequest(request_id=request_id, prompt_token_ids=(1,), sampling=sampling, handoff=handoff))
    store = Store()
    prefixes = BorrowedPrefixes(store, handoffs.borrower)  # type: ignore[arg-type]
    found = until("a verdict", lambda: (count := prefixes.find(wanted(request_id))) is not None and [count])
    assert found == ([3] if store.asked else [0])
    return bool(store.asked)


def test_a_prompt_is_lent_taken_over_and_given_back(stack: ExitStack):
    place = Place()
    prefill, decode = engine(stack, place), engine(stack, place)
    handoff = lend(prefill)
    assert handoff is not None
    assert (handoff.num_chunks, handoff.num_tokens, handoff.namespace) == (3, 96, "ab" * 32)
    assert 59 < handoff.expires_at - time.time() <= 60
    keys = [ChunkKey(NAMESPACE, link, TOKENS) for link in chain(3)]
    assert bytes(place.get(keys[2]) or b"")[:4] == bytes([4, 5, 4, 5])
    assert len(place.leases()) == prefill.leases["prefill"] == 1
    assert take_over(decode, handoff)
    assert decode.leases == {"prefill": 0, "decode": 1}
    decode.settled([end_of("b")], is_last=False)
    until("the lease ended", lambda: not place.leases())
    assert decode.leases["decode"] == 0
    assert (prefill.counts, decode.counts) == ({"prefill lent": 1}, {"decode honoured": 1})


def test_a_request_that_ends_before_its_lease_is_taken_over_gives_it_back(stack: ExitStack):
    place = Place()
    prefill, decode = engine(stack, place), engine(stack, place)
    handoff = lend(prefill)
    assert handoff is not None
    place.lookups.clear()
    sampling = SamplingParams(max_tokens=1)
    decode.arrived(AddRequest(request_id="b", prompt_token_ids=(1,), sampling=sampling, handoff=handoff))
    prefixes = BorrowedPrefixes(Store(), decode.borrower)  # type: ignore[arg-type]
    assert prefixes.find(wanted("b")) is None
    assert prefixes.find(wanted("b", may_wait=False)) == 0  # It has no more time to wait.
    place.lookups.set()
    until("the lease ended", lambda: decode.counts and not place.leases())


def test_the_answer_waits_for_the_chunks_and_nobody_else_does(stack: ExitStack):
    place = Place()
    prefill = engine(stack, place)
    place.gate.clear()
    assert prefill.lender is not None
    prefill.lender.lend("a", chain(3), range(6), SECONDS)
    assert prefill.settled([end_of("a"), end_of("other")], is_last=False) == [end_of("other")]
    place.gate.set()
    (answer,) = until("lent", lambda: prefill.settled((), is_last=False))
    assert answer.handoff is not None


def test_what_the_tier_has_already_is_lent_without_a_copy(stack: ExitStack):
    place = Place()
    prefill = engine(stack, place)
    assert lend(prefill) is not None
    puts = place.stats.puts
    again = lend(prefill, "again", num_chunks=4)
    assert again is not None
    assert (again.num_chunks, place.stats.puts) == (4, puts + 1)


def test_no_whole_chunk_nothing_lent(stack: ExitStack):
    prefill = engine(stack, Place())
    assert lend(prefill, num_chunks=0) is None
    assert prefill.recent[0].message == "nothing is lent: the prompt has no whole chunk"


def test_a_dead_tier_lends_nothing_and_the_answer_comes(stack: ExitStack):
    place = Place()
    prefill, decode = engine(stack, place), engine(stack, place)
    handoff = lend(prefill)
    assert handoff is not None
    place.is_dead = True
    assert lend(prefill, "b", seed=1) is None
    assert not take_over(decode, handoff)
    assert (prefill.counts["prefill late"], decode.counts) == (1, {"decode lease": 1})


def test_what_only_waits_to_be_written_is_not_lent(stack: ExitStack, monkeypatch: pytest.MonkeyPatch):
    """As in S3: a put only queues, a lookup finds what is queued, and no other engine does before the flush."""
    is_up = threading.Event()
    stack.callback(is_up.set)
    place = MemoryTier(1 << 20)
    monkeypatch.setattr(place, "flush", lambda: is_up.wait(SECONDS))
    level = Level(place, LevelOptions(name="s3", is_indexed=False, is_durable=True, is_shared=True))
    prefill = open_handoffs(TieredStore([level]), Copier(), NAMESPACE, TOKENS)
    stack.callback(prefill.close)
    for link in chain(3):  # The engine's own write-behind was there first.
        place.put(ChunkKey(NAMESPACE, link, TOKENS), bytes(BYTES))
    assert prefill.lender is not None
    begun = time.monotonic()
    prefill.lender.lend("a", chain(3), range(6), 0.1)
    (answer,) = answers(prefill, end_of("a"))
    assert answer.handoff is None
    assert prefill.counts == {"prefill late": 1}
    assert time.monotonic() - begun < SECONDS / 2
    is_up.set()
    assert lend(prefill, "b") is not None


def test_chunks_of_another_namespace_are_computed(stack: ExitStack):
    place = Place()
    prefill, decode = engine(stack, place), engine(stack, place, namespace=bytes.fromhex("cd" * 32))
    handoff = lend(prefill)
    assert handoff is not None
    assert not take_over(decode, handoff)
    assert decode.counts == {"decode namespace": 1}
    assert "another model" in decode.recent[0].message


def test_a_lease_of_an_earlier_epoch_is_worth_nothing(stack: ExitStack):
    place = Place()
    prefill, decode = engine(stack, place), engine(stack, place)
    handoff = lend(prefill)
    assert handoff is not None
    prefill.reset()
    until("the lease ended", lambda: not place.leases())
    assert not take_over(decode, handoff)
    later = lend(prefill, "later")
    assert later is not None
    assert later.epoch != handoff.epoch
    # Nor does a new epoch's name make an old lease good, or the other way round.
    mixed = Handoff(**{name: getattr(later, name) for name in later.__struct_fields__} | {"epoch": handoff.epoch})
    assert not take_over(decode, mixed, "mixed")
    assert take_over(decode, later, "later")
    assert decode.counts == {"decode lease": 2, "decode honoured": 1}


def test_a_reset_while_chunks_are_on_their_way_lends_nothing(stack: ExitStack):
    place = Place()
    prefill = engine(stack, place)
    place.gate.clear()
    assert prefill.lender is not None
    prefill.lender.lend("a", chain(3), range(6), SECONDS)
    prefill.reset()
    place.gate.set()
    (answer,) = answers(prefill, end_of("a"))
    assert answer.handoff is None
    until("nothing held", lambda: prefill.counts == {"prefill stale": 1} and not place.leases())
    # The chunk that came after the reset had emptied the tier went again, and no other followed.
    until("nothing there", lambda: place.stats.puts == 1 and not list(place.keys()))


def test_an_expired_lease_is_computed(stack: ExitStack):
    place = Place()
    prefill, decode = engine(stack, place, lease_s=0.02), engine(stack, place)
    handoff = lend(prefill)
    assert handoff is not None
    until("expired", lambda: time.time() > handoff.expires_at)
    assert not take_over(decode, handoff)
    assert decode.counts == {"decode expired": 1}
    assert prefill.leases["prefill"] == 0


def test_without_a_tier_that_others_reach_nothing_is_lent_or_borrowed(stack: ExitStack):
    nobody = open_handoffs()
    stack.callback(nobody.close)
    assert not nobody.lends
    fields = {"transfer_id": "ab" * 8, "epoch": "ab.0", "namespace": "ab" * 32, "num_tokens": 1, "num_chunks": 1}
    assert not take_over(nobody, Handoff(**fields, expires_at=time.time() + 60.0))
    assert nobody.counts == {"decode no_store": 1}


def test_an_engine_that_stops_answers_what_waits(stack: ExitStack):
    place = Place()
    prefill = engine(stack, place)
    place.gate.clear()
    assert prefill.lender is not None
    prefill.lender.lend("a", chain(3), range(6), SECONDS)
    assert prefill.settled([end_of("a")], is_last=True) == [end_of("a")]
    place.gate.set()


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_client_that_goes_while_its_answer_waits_leaves_no_lease(stack: ExitStack, is_lent: bool):
    place = Place()
    prefill = engine(stack, place)
    place.gate.clear()
    assert prefill.lender is not None
    prefill.lender.lend("a", chain(3), range(6), SECONDS)
    assert not prefill.settled([end_of("a")], is_last=False)
    if is_lent:
        place.gate.set()
        until("lent", place.leases)
    ended = prefill.aborted("a")
    assert ended is not None
    assert ended.finish_reason == "abort"
    place.gate.set()
    until("settled", lambda: prefill.counts)
    until("no lease", lambda: not place.leases() and prefill.leases["prefill"] == 0)
    assert prefill.settled((), is_last=False) == []
    assert prefill.aborted("a") is None


def test_hand_offs_under_way_are_bounded(stack: ExitStack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paceline_engine.kv_lender.MAX_BYTES", 7 * BYTES)
    place = Place()
    prefill = engine(stack, place)
    place.gate.clear()
    assert prefill.lender is not None
    took = [prefill.lender.lend(str(seed), chain(3, seed), range(6), SECONDS) for seed in range(4)]
    assert took == [True, True, False, False]
    place.gate.set()
    until("memory given back", lambda: prefill.counts.get("prefill lent") == 2)
    assert prefill.lender.lend("later", chain(3, 9), range(6), SECONDS)
    assert prefill.counts["prefill busy"] == 2


def test_leases_come_back_to_zero_after_a_storm_of_aborts(stack: ExitStack):
    """Each of 200 hand-offs is cut at a random point: by its client, by an engine that is killed, or not at all."""
    dice, place, lease_s = Random(7), Place(), 0.3
    prefill, decode = engine(stack, place, lease_s=lease_s), engine(stack, place, lease_s=lease_s)
    killed: list[Handoffs] = []
    for number in range(200):
        name, cut = str(number), dice.choice(("waiting", "answered", "arrived", "loading", "killed", "nowhere"))
        assert prefill.lender is not None
        prefill.lender.lend(name, chain(3, number % 8), range(6), SECONDS)
        if cut == "waiting":
            prefill.settled([end_of(name)], is_last=False)
            prefill.aborted(name)
            continue
        (answer,) = answers(prefill, end_of(name))
        if cut == "answered" or answer.handoff is None:
            continue
        other = decode
        if cut == "killed":  # Nothing of it ever runs again, so nothing is given back.
            other = engine(stack, place, lease_s=lease_s)
            killed.append(other)
            other.borrower.release = lambda _: None  # type: ignore[method-assign]
        if cut == "arrived":
            sampling = SamplingParams(max_tokens=1)
            other.arrived(AddRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling, handoff=answer.handoff))
        else:
            take_over(other, answer.handoff, name)
        other.settled([end_of(name)], is_last=False)
    until("no lease", lambda: not place.leases())
    until("none known", lambda: prefill.leases["prefill"] == decode.leases["decode"] == 0)
    assert killed
    assert sum(prefill.counts.values()) == 200
    known = {f"{side} {outcome}" for side, outcomes in OUTCOMES.items() for outcome in outcomes}
    assert {*prefill.counts, *decode.counts} <= known
