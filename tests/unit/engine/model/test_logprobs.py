"""Logprobs while decoding are those of reading the same text again, and text depends on no chunk and no preemption."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from paceline_engine.core.spec import SpeculationConfig

MAX_TOKENS = 16


@pytest.fixture(scope="module")
def prompts(tiny, prompts_for):
    return prompts_for(5, tiny.config.vocab_size, seed=6, longest=30)


def divergence(decoded, read) -> float:
    """KL of two records of one position that hold the whole vocabulary."""
    p, q = dict(decoded.top), dict(read.top)
    assert len(p) == len(q)
    return sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)


def decode_and_reread(loop_for, prompts, **sampling):
    """Records of each position of each output, first as it was decoded, then as part of a prompt."""
    loop = loop_for()
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS, logprobs=199, seed=i, **sampling)
    texts = loop.run()
    reread = loop_for()
    for i, prompt in enumerate(prompts):
        reread.add(str(i), [*prompt, *texts[str(i)]], 1, prompt_logprobs=199)
    reread.run()
    for i, prompt in enumerate(prompts):
        told = reread.prompt_logprobs[str(i)]
        assert told[0] is None
        assert len(told) == len(prompt) + MAX_TOKENS
        yield from zip(loop.logprobs[str(i)], told[len(prompt) :], strict=True)


@pytest.mark.parametrize("guessing", [False, True])
def test_decoded_logprobs_are_those_of_the_same_text_read_at_once(tiny, new_loop, prompts, guessing):
    """The best single test of paging, chunking and sampling together; sglang's test/kl_test_utils.py has the idea."""
    speculation = SpeculationConfig(method="ngram", num_tokens=3, min_n=1) if guessing else None
    pairs = list(
        decode_and_reread(lambda: new_loop(tiny, speculation=speculation), prompts, temperature=0.7, top_p=0.9)
    )
    assert len(pairs) == len(prompts) * MAX_TOKENS
    for decoded, read in pairs:
        assert decoded.token_id == read.token_id
        assert decoded.rank == read.rank
        assert divergence(decoded, read) < 1e-6


def test_prompt_logprobs_equal_the_references_however_the_prompt_is_cut(tiny, new_loop, prompts):
    for chunk in (3, 64):
        loop = new_loop(tiny, prefill_chunk_tokens=chunk)
        for i, prompt in enumerate(prompts):
            loop.add(str(i), prompt, 2, prompt_logprobs=2)
        loop.run()
        for i, prompt in enumerate(prompts):
            with torch.inference_mode():
                wanted = tiny.reference(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
            told = loop.prompt_logprobs[str(i)]
            assert [entry and entry.token_id for entry in told] == [None, *prompt[1:]]
            for position, entry in enumerate(told[1:]):
                assert entry.logprob == pytest.approx(float(wanted[position, entry.token_id]), abs=1e-4)
                assert [token for token, _ in entry.top] == wanted[position].topk(2).indices.tolist()


def test_prompt_logprobs_come_once_and_whole_when_a_prompt_is_preempted(tiny, new_loop, prompts):
    plain = new_loop(tiny)
    preempted = new_loop(tiny, prefill_chunk_tokens=4)
    preempted.before_step = preempt_everybody(preempted, every=3, last=12)
    for loop in (plain, preempted):
        for i, prompt in enumerate(prompts):
            loop.add(str(i), prompt, 4, prompt_logprobs=0)
        loop.run()
    assert preempted.scheduler.num_preemptions > len(prompts)
    for name, told in plain.prompt_logprobs.items():
        again = preempted.prompt_logprobs[name]
        assert [entry and entry.token_id for entry in again] == [entry and entry.token_id for entry in told]
        for entry, other in zip(told[1:], again[1:], strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


def preempt_everybody(loop, every: int, last: int = 2000):
    """Before each `every`th step up to the `last` all running requests lose their blocks."""
    count = 0
    loop.scheduler.config = replace(loop.scheduler.config, max_preemptions=1000)

    def preempt():
        nonlocal count
        count += 1
        if count % every == 0 and count <= last:
            for request in list(loop.scheduler._running):
                loop.scheduler._running.remove(request)
                loop.scheduler._preempt(request)

    return preempt


SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 4},
    "ruled": {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 9},
}


@pytest.fixture(scope="module")
def texts(tiny, new_loop, prompts):
    """What is said without any trouble, by sampling."""
    return {name: run(new_loop(tiny), prompts, **sampling) for name, sampling in SAMPLINGS.items()}


def run(loop, prompts, **sampling):
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS, **sampling)
    return loop.run()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_preemption_before_every_step_changes_nothing(tiny, new_loop, prompts, texts, name):
    for speculation in (None, SpeculationConfig(method="ngram", num_tokens=2, min_n=1)):
        # A whole context must fit in a step, or nobody would ever get on.
        loop = new_loop(tiny, speculation=speculation, prefill_chunk_tokens=96, max_num_batched_tokens=500)
        loop.before_step = preempt_everybody(loop, every=1)
        assert run(loop, prompts, **SAMPLINGS[name]) == texts[name]
        assert loop.scheduler.num_preemptions >= MAX_TOKENS


def test_every_size_of_chunk_says_the_same(tiny, new_loop, prompts, texts):
    longest = max(map(len, prompts))
    for chunk in range(1, longest + 2):
        loop = new_loop(tiny, prefill_chunk_tokens=chunk)
        assert run(loop, prompts) == texts["greedy"]
    assert texts["greedy"]["0"] == tiny.reference_tokens(prompts[0], MAX_TOKENS)
