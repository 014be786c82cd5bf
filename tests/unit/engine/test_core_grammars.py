"""The API process's account of the core's grammars: sent once, kept while used, bounded, never lost to a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paceline_engine.core_grammars import Constraint, CoreGrammars, GrammarRefused
from paceline_engine.messages import CommandResult, DropGrammar, LoadGrammar, PrepareGrammars, ToCore


class Core:
    """Takes the messages in order and answers loads when asked; `held` is what it has."""

    def __init__(self, **bounds: int) -> None:
        self.sent: list[ToCore] = []
        self.held: dict[int, bytes] = {}
        self.ids: list[int] = []
        self._answers: dict[int, asyncio.Future[CommandResult]] = {}
        self.grammars = CoreGrammars(self.send, self.ask, **bounds)

    def send(self, message: ToCore) -> None:
        self.sent.append(message)
        if isinstance(message, DropGrammar):
            del self.held[message.grammar_id]

    def ask(self, make: Callable[[str], ToCore]) -> asyncio.Future[CommandResult]:
        message = make("id")
        assert isinstance(message, LoadGrammar)
        self.sent.append(message)
        self.held[message.grammar_id] = message.grammar
        self.ids.append(message.grammar_id)
        answer = self._answers[message.grammar_id] = asyncio.get_running_loop().create_future()
        return answer

    async def answer(self, grammar_id: int, num_bytes: int = 10, error: str | None = None) -> None:
        self._answers.pop(grammar_id).set_result(
            CommandResult(command_id="id", values={"bytes": num_bytes}, error=error)
        )
        await asyncio.sleep(0)

    async def answer_all(self) -> None:
        for grammar_id in list(self._answers):
            await self.answer(grammar_id)


def grammar(name: str) -> Constraint:
    return Constraint(key=name, grammar=name.encode())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_a_grammar_is_sent_once_and_its_requests_wait_until_it_is_loaded() -> None:
    async def work() -> None:
        core = Core()
        core.grammars.prepare()
        waits = [asyncio.create_task(core.grammars.ready(grammar("a"))) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()  # One client leaves; the others go on waiting.
        await asyncio.sleep(0)
        assert not any(task.done() for task in waits[1:])
        await core.answer(0)
        await asyncio.gather(*waits[1:])
        assert core.grammars.hold(grammar("a")) == core.grammars.hold(grammar("a")) == 0
        assert core.sent == [PrepareGrammars(), LoadGrammar(command_id="id", grammar_id=0, grammar=b"a")]

    run(work())


def test_one_that_cannot_be_loaded_is_told_and_may_be_tried_again_under_a_new_id() -> None:
    async def work() -> None:
        core = Core()
        for grammar_id in (0, 1):
            wait = asyncio.create_task(core.grammars.ready(grammar("bad")))
            await asyncio.sleep(0)
            await core.answer(grammar_id, error="it is damaged")
            with pytest.raises(GrammarRefused, match="it is damaged"):
                await wait
        assert (core.held, len(core.grammars)) == ({}, 0)

    run(work())


def test_what_a_live_request_uses_is_never_dropped_and_the_rest_goes_oldest_first() -> None:
    async def work() -> None:
        core = Core(max_grammars=2)
        held = core.grammars.hold(grammar("a"))
        for name in "bcd":
            core.grammars.hold(grammar(name))
        await core.answer_all()
        assert set(core.held.values()) == {b"a", b"b", b"c", b"d"}  # All are used: the bound on live requests holds.
        for grammar_id in (1, 3, 2):
            core.grammars.release(grammar_id)
        assert set(core.held.values()) == {b"a", b"d"}
        core.grammars.release(held)
        assert set(core.held.values()) == {b"a", b"d"}
        core.grammars.hold(grammar("e"))
        await core.answer_all()
        assert set(core.held.values()) == {b"d", b"e"}

    run(work())


def test_the_bound_in_bytes_is_the_cores_own_measure() -> None:
    async def work() -> None:
        core = Core(max_bytes=100)
        for name in "abc":
            core.grammars.release(core.grammars.hold(grammar(name)))
            await core.answer(core.ids[-1], num_bytes=60)
        assert set(core.held.values()) == {b"c"}

    run(work())


def test_one_dropped_before_its_request_came_is_sent_again_right_before_it_under_a_new_id() -> None:
    async def work() -> None:
        core = Core(max_grammars=1)
        for name in ("a", "b"):
            wait = asyncio.create_task(core.grammars.ready(grammar(name)))
            await asyncio.sleep(0)
            await core.answer(core.ids[-1])
            await wait
        assert set(core.held.values()) == {b"b"}
        again = core.grammars.hold(grammar("a"))
        assert again == 2
        assert core.sent[-1] == LoadGrammar(command_id="id", grammar_id=2, grammar=b"a")

    run(work())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_and_goes_a_request_names_a_grammar_that_the_core_holds(seed: int) -> None:
    async def work() -> None:
        dice = random.Random(seed)
        core = Core(max_grammars=dice.randint(1, 4), max_bytes=dice.choice((15, 35, 1000)))
        live: list[tuple[int, str]] = []
        for _ in range(300):
            what = dice.random()
            if what < 0.45:
                name = dice.choice("abcdefg")
                live.append((core.grammars.hold(grammar(name)), name))
            elif what < 0.8 and live:
                core.grammars.release(live.pop(dice.randrange(len(live)))[0])
            elif core._answers:
                error = "damaged" if dice.random() < 0.1 and not live else None
                await core.answer(dice.choice(list(core._answers)), error=error)
            for grammar_id, name in live:
                assert core.held[grammar_id] == name.encode()
        assert len(core.ids) == len(set(core.ids)), "an id was used twice"
        for grammar_id, _ in live:
            core.grammars.release(grammar_id)
        await core.answer_all()
        assert len(core.held) == len(core.grammars) <= core.grammars._max_grammars

    run(work())
