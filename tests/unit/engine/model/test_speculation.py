"""Speculation changes how long an answer takes, never what is said: greedy text, seeded paths, distributions."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline_engine.backends.cpu_drafting import make_draft_model
from paceline_engine.backends.cpu_model import TorchModel
from paceline_engine.batch import BlockTables, build_batch
from paceline_engine.config import EngineConfig
from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.core_setup import build_core
from paceline_engine.messages import AddRequest, SamplingParams
from paceline_engine.models.decoder import Decoder
from paceline_engine.paged_kv import PagedKV
from paceline_engine.sampling.noise import Stream, gumbel_at, row_keys, uniforms
from paceline_engine.sampling.row import Row
from paceline_engine.sampling.sampler import Sampler
from paceline_engine.sampling.speculation import Drafts, num_accepted, residual

MAX_TOKENS = 24
P, Q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.5, 0.3])
# 99.9th percentile of chi-square with 2 degrees of freedom.
CHI_SQUARE_BOUND = 13.82


def chi_square(tokens: np.ndarray, wanted: np.ndarray) -> float:
    expected = wanted * len(tokens)
    return float((((np.bincount(tokens, minlength=len(wanted)) - expected) ** 2) / expected).sum())


def draw(p: np.ndarray, rows: int, seed: int, stream: Stream, position: int = 0) -> np.ndarray:
    keys = row_keys(range(seed, seed + rows), [position] * rows, stream)
    return (np.log(np.maximum(p, 1e-300)) + gumbel_at(keys[:, None], np.arange(p.shape[-1]))).argmax(-1)


def one_guess(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Guesses from Q, whether they stand against P, and what the rule makes of them."""
    guesses = draw(Q, rows, 0, Stream.DRAFT)
    u = uniforms(row_keys(range(rows), [0] * rows, Stream.ACCEPT))
    kept = num_accepted(P[guesses][:, None], Q[guesses][:, None], u[:, None]) == 1
    replaced = draw(np.broadcast_to(residual(P, Q), (rows, 3)), rows, 0, Stream.RESIDUAL)
    return guesses, kept, np.where(kept, guesses, replaced)


def test_the_residual_and_the_rejection_rate_are_those_of_the_formula():
    assert residual(P, Q).tolist() == [1.0, 0.0, 0.0]
    _, kept, _ = one_guess(200_000)
    assert abs((~kept).mean() - np.maximum(P - Q, 0).sum()) < 0.004
    assert np.maximum(P - Q, 0).sum() == pytest.approx(0.4)


def test_outputs_have_the_targets_distribution_and_the_naive_rules_do_not():
    """Redrawing from p itself after a rejection is the classic mistake; the same test must see it."""
    guesses, kept, tokens = one_guess(200_000)
    assert chi_square(tokens, P) < CHI_SQUARE_BOUND
    naive = np.where(kept, guesses, draw(np.broadcast_to(P, (len(kept), 3)), len(kept), 0, Stream.RESIDUAL))
    assert chi_square(naive, P) > 100 * CHI_SQUARE_BOUND
    assert chi_square(naive, np.array([0.44, 0.42, 0.14])) < CHI_SQUARE_BOUND


def test_the_first_rejection_ends_it():
    p, q = np.array([[0.9, 0.1, 0.9], [0.1, 0.9, 0.9], [0.9, 0.9, 0.9]]), np.full((3, 3), 0.5)
    assert num_accepted(p, q, np.full((3, 3), 0.5)).tolist() == [1, 0, 3]


def chain(rows: int, target: np.ndarray, draft: np.ndarray, temperature: float) -> list[list[int]]:
    """Two guesses for each of `rows` requests through the real sampler; target and draft are [previous, next]."""
    vocab_size = len(target)
    sampler = Sampler(vocab_size)
    items, states, logits = [], [], []
    first = draw(np.broadcast_to(draft[0], (rows, vocab_size)), rows, 0, Stream.DRAFT, 1)
    second = np.array([0] * rows)
    for token in range(vocab_size):
        at = np.flatnonzero(first == token)
        keys = row_keys(at.tolist(), [2] * len(at), Stream.DRAFT)
        second[at] = (np.log(draft[token]) + gumbel_at(keys[:, None], np.arange(vocab_size))).argmax(-1)
    for seed in range(rows):
        guesses = (int(first[seed]), int(second[seed]))
        sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=seed)
        request = AdmittedRequest(request_id=str(seed), token_ids=(0,), num_prompt_tokens=1, sampling=sampling)
        row = Row(request, vocab_size, ())
        row.drafts = Drafts(position=1, token_ids=guesses, probabilities=draft[[0, guesses[0]]].astype(np.float32))
        share = ScheduledRequest(
            request_id=str(seed),
            token_ids=[0, *guesses],
            start=0,
            new_block_ids=[],
            sample=True,
            num_draft_tokens=2,
        )
        items.append(share)
        states.append(row)
        logits.append(np.log(target[[0, *guesses]]) * temperature)
    results = sampler.sample(torch.tensor(np.concatenate(logits), dtype=torch.float32), items, states)
    return [list(result.token_ids) for result in results]


def test_the_sampler_keeps_the_distribution_over_several_guesses_and_the_bonus():
    rng = np.random.default_rng(1)
    target, draft = rng.dirichlet([1.0] * 3, 3), rng.dirichlet([2.0] * 3, 3)
    outputs = chain(8_000, target, draft, temperature=0.7)
    assert {len(output) for output in outputs} == {1, 2, 3}
    assert chi_square(np.array([output[0] for output in outputs]), target[0]) < CHI_SQUARE_BOUND
    for place in (1, 2):
        for previous in range(3):
            following = [o[place] for o in outputs if len(o) > place and o[place - 1] == previous]
            assert chi_square(np.array(following), target[previous]) < CHI_SQUARE_BOUND


@pytest.fixture(scope="module")
def noisy(tiny, tmp_path_factory):
    """A drafter that is often right: the target with its weights a little off."""
    folder = tmp_path_factory.mktemp("noisy")
    generator = torch.Generator().manual_seed(3)
    files = []
    for path in tiny.files:
        weights = {
            name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in load_file(path).items()
        }
        files.append(folder / path.name)
        save_file(weights, files[-1])
    return replace(tiny, files=files)


KINDS = ["ngram", "same", "noisy", "layers"]


def make(kind, tiny, noisy, new_loop, num_tokens=3, **options):
    method = {"ngram": "ngram", "layers": "selfDraft"}.get(kind, "draft")
    draft = {"ngram": None, "layers": 2, "same": tiny, "noisy": noisy}[kind]
    config = SpeculationConfig(method=method, num_tokens=num_tokens, min_n=1, max_n=3)
    loop = new_loop(tiny, speculation=config, draft=draft, **options)
    # Always guess: whether it pays is the policy's business, tested elsewhere.
    loop.scheduler.speculation.num_wanted = lambda traffic_class: num_tokens
    return loop


def run(loop, prompts, **sampling):
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS, **sampling)
    return loop.run()


@pytest.fixture(scope="module")
def prompts(tiny, prompts_for):
    """Some of them repeat themselves, so that there is something to copy."""
    prompts = prompts_for(6, tiny.config.vocab_size, seed=3, longest=20)
    return [prompt * 2 if i % 2 else prompt for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    return {str(i): tiny.reference_tokens(prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_greedy_text_is_the_references_with_every_kind_of_guess(
    kind, num_tokens, tiny, noisy, new_loop, prompts, expected
):
    loop = make(kind, tiny, noisy, new_loop, num_tokens)
    assert run(loop, prompts) == expected
    counters = loop.scheduler.speculation.counters
    assert counters.num_draft_tokens > 0
    assert counters.num_accepted_tokens > 0 or kind == "layers"
    if kind == "same":
        assert counters.num_accepted_tokens == counters.num_draft_tokens
    if kind == "noisy":
        assert counters.num_accepted_tokens < counters.num_draft_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_survives_preemption_beside_guesses(kind, tiny, noisy, new_loop, prompts, expected):
    loop = make(kind, tiny, noisy, new_loop, num_blocks=20)
    assert run(loop, prompts) == expected
    assert loop.scheduler.num_preemptions > 0


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_guesses_cross_block_boundaries(block_size, tiny, noisy, new_loop, prompts, expected):
    for kind in ("noisy", "layers"):
        order = list(range(300))
        random.Random(block_size).shuffle(order)
        loop = make(kind, tiny, noisy, new_loop, 5, block_size=block_size, num_blocks=300, order=order)
        assert run(loop, prompts) == expected


def test_a_drafter_that_says_the_same_is_always_right_also_when_sampled(tiny, noisy, new_loop, prompts):
    """Its q is p, rules included, so nothing may be refused; it fails if q isn't what guesses were drawn from."""
    sampling = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.6, "seed": 5, "logit_bias": ((7, 2.0),)}
    loop = make("same", tiny, noisy, new_loop)
    run(loop, prompts, **sampling)
    counters = loop.scheduler.speculation.counters
    assert counters.num_draft_tokens > 50
    # One over the other differs from 1 by rounding only.
    assert counters.num_accepted_tokens >= counters.num_draft_tokens - 1


def test_guesses_without_a_distribution_leave_a_seeded_path_alone(tiny, noisy, new_loop, prompts):
    sampling = {"temperature": 0.8, "top_k": 20, "seed": 9}
    plain = run(new_loop(tiny), prompts, **sampling)
    loop = make("ngram", tiny, noisy, new_loop)
    assert run(loop, prompts, **sampling) == plain
    assert loop.scheduler.speculation.counters.num_draft_tokens > 0


RULES = {
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "bias": {"logit_bias": ((3, 4.0), (9, -4.0))},
    "bans": {"bad_words": ((5,), (7, 8), (3, 3)), "allowed_token_ids": (*range(0, 199, 3), 7, 8)},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, 199, 4))},
}


@pytest.mark.parametrize("rules", RULES)
def test_every_rule_holds_at_every_verified_position(rules, tiny, noisy, new_loop, prompts):
    plain = run(new_loop(tiny), prompts, **RULES[rules])
    if rules == "min_tokens":
        assert min(len(tokens) for tokens in plain.values()) >= 12
    for kind in KINDS:
        assert run(make(kind, tiny, noisy, new_loop), prompts, **RULES[rules]) == plain


def test_lenience_keeps_more_guesses(tiny, noisy, new_loop, prompts):
    def accepted(sampling, **options):
        loop = make("noisy", tiny, noisy, new_loop, **options)
        texts = run(loop, prompts, **sampling)
        counters = loop.scheduler.speculation.counters
        return counters.num_accepted_tokens / counters.num_draft_tokens, texts

    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        exact, _ = accepted(sampling)
        lenient, texts = accepted(sampling, lenience=0.1)
        assert lenient > exact
        assert all(len(tokens) == MAX_TOKENS for tokens in texts.values())


@pytest.mark.parametrize("lenience", [0.0, -1.0, 1.1])
def test_a_lenience_that_makes_no_sense_is_refused(lenience):
    with pytest.raises(ValueError, match="lenience must be above 0 and at most 1"):
        Sampler(10, lenience)


def test_verification_is_attended_to_in_groups_not_one_by_one(tiny):
    """40 sequences that verify 4 guesses each: as many groups as lengths differ by factors of two."""
    tables = BlockTables(40, 8, 4)
    admitted, shares = [], []
    for i in range(40):
        sampling = SamplingParams(max_tokens=1)
        admitted.append(AdmittedRequest(request_id=str(i), token_ids=(0,), num_prompt_tokens=1, sampling=sampling))
        start = 8 + i % 9
        shares.append(
            ScheduledRequest(
                request_id=str(i),
                token_ids=[1] * 5,
                start=start,
                new_block_ids=list(range(i * 8, i * 8 + 8)),
                sample=True,
                num_draft_tokens=4,
            )
        )
    tables.apply(StepPlan(scheduled=tuple(shares), admitted=tuple(admitted)))
    batch = build_batch(shares, tables, torch.float32)
    assert batch.prefills == ()
    assert len(batch.decodes) <= 2
    assert len(batch.logits_rows) == 40 * 5


@pytest.mark.parametrize("change", [{"vocab_size": 300}, {"max_position_embeddings": 50}])
def test_a_draft_model_that_does_not_fit_is_refused(tiny, tmp_path_factory, build, change):
    """`tiny` has 199 tokens; 96 positions are wanted."""
    drafter = build(tmp_path_factory.mktemp("drafter"), change)
    folder = drafter.files[0].parent
    (folder / "tokenizer.json").write_text("{}")
    kv = PagedKV(tiny.config, 8, 4, torch.float32)
    decoder = TorchModel(Decoder(tiny.config, tiny.files, max_model_len=96, dtype=torch.float32))
    config = EngineConfig(model_dir="", speculative_method="draft", speculative_model=str(folder))
    with pytest.raises(ValueError, match=r"same vocabulary|fewer than max-model-len 96"):
        make_draft_model(config, decoder, kv, tiny.files, max_model_len=96, threads=1)


def test_the_cpu_device_drafts_as_it_is_configured(tiny, prompts, expected, monkeypatch):
    """The whole backend: a draft model of its own, the model's first layers, its weights in fewer bits."""
    # A tiny model's guess costs as much as a step, so that nobody would want one.
    monkeypatch.setattr("paceline_engine.backends.cpu.measure_draft_cost", lambda _: 0.1)
    kept: dict[str, int] = {}
    folder = tiny.files[0].parent
    (folder / "tokenizer.json").write_text("{}")
    kinds = [
        {"speculative_method": "draft", "speculative_model": str(folder)},
        {"speculative_layers": 2},
        {"speculative_layers": 2, "cpu_kernels": "torch"},
        {"speculative_quantization": "int8"},
        {"speculative_quantization": "int4"},
        {"speculative_quantization": "auto"},
    ]
    for options in kinds:
        config = EngineConfig(
            model_dir=str(folder),
            kv_cache_bytes=1 << 20,
            max_num_seqs=4,
            speculative_num_tokens=3,
            **{"speculative_method": "selfDraft", **options},
        )
        core = build_core(config)
        for name in expected:
            sampling = SamplingParams(max_tokens=MAX_TOKENS)
            core.scheduler.add(
                AddRequest(request_id=name, prompt_token_ids=tuple(prompts[int(name)]), sampling=sampling)
            )
        texts: dict[str, list[int]] = {name: [] for name in expected}
        while core.scheduler.has_work:
            plan = core.scheduler.schedule()
            for output in core.scheduler.update(plan, core.backend.execute(plan)):
                texts[output.request_id] += output.new_token_ids
        assert texts == expected
        counters = core.scheduler.speculation.counters
        assert counters.num_draft_tokens > 0
        kept[str(options.get("speculative_quantization"))] = counters.num_accepted_tokens
        if options == {"speculative_quantization": "int8"}:
            assert counters.num_accepted_tokens > 0.5 * counters.num_draft_tokens
    assert kept["auto"] == kept["int4"]


def test_what_a_guess_costs_is_measured_where_something_drafts(tiny):
    (tiny.files[0].parent / "tokenizer.json").write_text("{}")
    config = EngineConfig(model_dir=str(tiny.files[0].parent), kv_cache_bytes=1 << 20, speculative_method="selfDraft")
    assert build_core(config).scheduler.speculation.guess_cost > 0.0
    assert (
        build_core(msgspec.structs.replace(config, speculative_method="ngram")).scheduler.speculation.guess_cost == 0.0
    )
