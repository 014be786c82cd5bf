"""The real model on shared blocks: a warm cache, the memory tier, preemption and guesses leave greedy text as it is."""

from __future__ import annotations

import inspect

import pytest
import torch

from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.kv_transfer import KVTransfer
from paceline_kvstore.tiers.memory import MemoryTier

NAMESPACE = "ab" * 32


@pytest.fixture(scope="module")
def work(tiny, prompts_for) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts with a common trunk, and transformers' continuation of each."""
    trunk, *tails = prompts_for(7, tiny.config.vocab_size, seed=11, longest=14)
    prompts = [(trunk * 30)[:26] + tail for tail in tails]
    return {str(number): (prompt, tiny.reference_tokens(prompt, 14)) for number, prompt in enumerate(prompts)}


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize(("num_blocks", "chunk"), [(200, 16), (26, 16), (24, 3)])
def test_greedy_text_is_that_of_transformers(tiny, new_loop, work, index, method, tier, num_blocks, chunk):
    def make_store(kv) -> KVTransfer:
        return KVTransfer(kv, MemoryTier(1 << 20), NAMESPACE, chunk_tokens=8)

    loop = new_loop(
        tiny,
        num_blocks=num_blocks,
        max_num_seqs=5,
        prefill_chunk_tokens=chunk,
        make_store=make_store if tier else None,
    )
    kv = loop.scheduler.kv
    kv.cache = PrefixCache(kv.pool, kv.block_size, index)
    speculation = SpeculationConfig(method=method, min_n=1)
    loop.scheduler = Scheduler(loop.scheduler.config, kv, tiny.config.eos_token_ids, speculation)
    for round_number in range(2):
        for name, (prompt, _) in work.items():
            loop.add(f"{round_number}-{name}", prompt, 14)
        loop.run()
    for name, (_, expected) in work.items():
        assert loop.tokens[f"0-{name}"] == loop.tokens[f"1-{name}"] == expected
    assert kv.cache.num_hit_tokens > 0
    assert (loop.scheduler.num_preemptions > 0) == (num_blocks < 200)
    assert kv.num_restored_sequences == 0 or tier


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_kv_that_is_not_finite_fails_who_found_it_and_nobody_after(tiny, new_loop, work, index):
    loop = new_loop(tiny, num_blocks=200)
    kv = loop.scheduler.kv
    kv.cache = PrefixCache(kv.pool, kv.block_size, index)
    prompt, expected = work["0"]
    loop.add("maker", prompt, 14)
    loop.run()
    [(_, copies), *_] = kv.cache.entries()
    loop.runner.kv.tensor[1, 1, copies[0], 0] = torch.nan
    for name in ("finder", "next"):
        loop.add(name, prompt, 14)
        loop.run()
    assert "isn't finite" in loop.finished["finder"].error
    assert loop.tokens["next"] == loop.tokens["maker"] == expected
    loop.scheduler.check_integrity()


def test_the_memory_tier_never_writes_into_blocks_that_were_found(tiny, new_loop, work):
    """What the cache gave may be shared with others; only what lies behind it is brought back."""
    signature = inspect.signature(KVTransfer.load)
    assert signature.parameters["start"].default == 0
    starts: list[int] = []

    class Watched(KVTransfer):
        def __init__(self, kv, *arguments) -> None:
            super().__init__(kv, *arguments)
            self.kv = kv

        def load(self, request, num_tokens: int, start: int = 0) -> int:
            before = [self.kv.tensor[:, :, block].clone() for block in request.block_ids[: start // 4]]
            loaded = super().load(request, num_tokens, start)
            after = [self.kv.tensor[:, :, block] for block in request.block_ids[: start // 4]]
            assert all(bool((one == other).all()) for one, other in zip(before, after, strict=True))
            starts.append(start)
            return loaded

    loop = new_loop(
        tiny, num_blocks=26, max_num_seqs=5, make_store=lambda kv: Watched(kv, MemoryTier(1 << 20), NAMESPACE, 8)
    )
    kv = loop.scheduler.kv
    kv.cache = PrefixCache(kv.pool, kv.block_size)
    for name, (prompt, _) in work.items():
        loop.add(name, prompt, 14)
    loop.run()
    assert loop.tokens == {name: expected for name, (_, expected) in work.items()}
    assert any(start > 0 for start in starts), "nothing was both found and restored"
