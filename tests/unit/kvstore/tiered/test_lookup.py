"""Lookups that wait for more than one level: the nearer one counts, answers come in any order or not at all."""

from __future__ import annotations

from collections.abc import Callable

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiered.level import Level, LevelOptions
from paceline_kvstore.tiered.lookup import Lookup
from paceline_kvstore.tiers import MemoryTier

Answer = Callable[[int], None]


def test_the_plan_grows_with_each_answer_and_prefers_the_nearer_level(key: Callable[..., ChunkKey]) -> None:
    memory, node, s3 = (Level(MemoryTier(0), LevelOptions(name=name)) for name in ("memory", "node", "s3"))
    keys = [key(number) for number in range(6)]
    lookup = Lookup(keys, [memory], bytes_per_token=10)
    answers: list[Answer] = []

    def submit(answer: Answer) -> bool:
        answers.append(answer)
        return True

    lookup.ask(node, submit)
    lookup.ask(s3, submit)
    assert lookup.is_pending and lookup.plan.tokens_by_level() == {"memory": 16}
    answers[1](4)
    assert not lookup.wait(0.0)
    assert [chunk.level.name for chunk in lookup.plan.chunks] == ["memory", "s3", "s3", "s3", "s3"]
    answers[0](2)
    assert lookup.wait(0.0) and not lookup.is_pending
    assert [chunk.level.name for chunk in lookup.plan.chunks] == ["memory", "node", "node", "s3", "s3"]
    assert [chunk.key for chunk in lookup.plan.chunks] == keys[:5]
    assert (lookup.plan.num_tokens, lookup.plan.chunks[0].num_bytes) == (80, 160)
    assert lookup.plan.first(2).tokens_by_level() == {"memory": 16, "node": 16}


def test_a_question_that_could_not_be_asked_is_a_miss(key: Callable[..., ChunkKey]) -> None:
    s3 = Level(MemoryTier(0), LevelOptions(name="s3"))
    lookup = Lookup([key(1)], [], 10)
    lookup.ask(s3, lambda answer: False)
    assert not lookup.is_pending and len(lookup.plan) == 0
