"""Embeddings are transformers' last hidden state, whatever else is in the batch, cold, in chunks and from the cache."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from paceline_engine.backends.cpu_native import NativeDecoder
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.models.decoder import Decoder
from paceline_engine.models.loader import default_cache_dir
from paceline_engine.native.build import ensure_library, find_compiler
from paceline_engine.native.library import load_library

TOLERANCE = {"atol": 2e-5, "rtol": 0.0}
GEOMETRIES = ["gqa-tied", "mha-untied", "bias", "llama3-rope", "qwen3-qk-norm"]


@pytest.fixture(params=["torch", pytest.param("native", marks=pytest.mark.native)])
def make_decoder(request):
    if request.param == "torch":
        return partial(Decoder, dtype=torch.float32)
    if find_compiler() is None:
        pytest.skip("no C++ compiler here")
    library = load_library(ensure_library(default_cache_dir()))
    return partial(NativeDecoder, library, weight_format="float32", threads=2)


def close_to_transformers(checkpoint, loop, prompts) -> None:
    for i, prompt in enumerate(prompts):
        ours = loop.embedding(str(i))
        assert loop.finished[str(i)].finish_reason == "stop"
        assert not loop.tokens[str(i)]
        assert float(ours.norm()) == pytest.approx(1.0, abs=1e-5)
        torch.testing.assert_close(ours, checkpoint.reference_embedding(prompt), **TOLERANCE)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_embeddings_equal_transformers_in_a_batch_with_chats(
    checkpoints, new_loop, prompts_for, make_decoder, geometry
):
    checkpoint = checkpoints(geometry)
    prompts = prompts_for(6, checkpoint.config.vocab_size, seed=4, longest=50)
    loop = new_loop(checkpoint, make_decoder=make_decoder)
    chats = {f"chat {i}": prompt[:20] for i, prompt in enumerate(prompts[:3])}
    for name, prompt in chats.items():
        loop.add(name, prompt, 12, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 1, embed=True)
    tokens = loop.run()
    close_to_transformers(checkpoint, loop, prompts)
    assert {name: tokens[name] for name in chats} == {
        name: checkpoint.reference_tokens(prompt, 12) for name, prompt in chats.items()
    }


@pytest.mark.parametrize("chunk", [1, 5])
def test_embeddings_in_chunks(tiny, new_loop, prompts_for, make_decoder, chunk):
    prompts = prompts_for(5, tiny.config.vocab_size, seed=9, longest=40)
    loop = new_loop(tiny, make_decoder=make_decoder, prefill_chunk_tokens=chunk)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 1, embed=True)
    loop.run()
    close_to_transformers(tiny, loop, prompts)


def test_embeddings_from_cached_prefixes(tiny, new_loop, prompts_for, make_decoder):
    prompts = [prompt * 3 for prompt in prompts_for(4, tiny.config.vocab_size, seed=3, longest=20)]
    loop = new_loop(tiny, make_decoder=make_decoder, cached=True)
    for i, prompt in enumerate(prompts):
        loop.add(f"before {i}", prompt, 2, embed=i % 2 == 0)  # An embedding's KV serves chats, and the other way.
    loop.run()
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 1, embed=True)
        loop.add(f"chat {i}", prompt, 4, ignore_eos=True)
    tokens = loop.run()
    close_to_transformers(tiny, loop, prompts)
    assert all(loop.finished[str(i)].num_cached_tokens > 0 for i, prompt in enumerate(prompts) if len(prompt) > 4)
    assert [tokens[f"chat {i}"] for i in range(4)] == [tiny.reference_tokens(prompt, 4) for prompt in prompts]


def test_a_preempted_embedding_is_computed_again(tiny, new_loop):
    """Chats ahead of it take the blocks that it has begun to fill."""
    prompt = list(range(3, 43))
    loop = new_loop(tiny, num_blocks=16, prefill_chunk_tokens=2, max_num_batched_tokens=6)
    for i in range(2):
        loop.add(f"chat {i}", [9, 8, 7, i], 30, ignore_eos=True)
    loop.step()
    loop.add("0", prompt, 1, embed=True)
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    close_to_transformers(tiny, loop, [prompt])


def test_embeddings_beside_a_drafter(tiny, new_loop, prompts_for):
    prompts = prompts_for(4, tiny.config.vocab_size, seed=6)
    loop = new_loop(tiny, speculation=SpeculationConfig(method="selfDraft", num_tokens=3), draft=1)
    loop.scheduler.speculation.num_wanted = lambda traffic_class: 3
    loop.add("chat", prompts[0], 10, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 1, embed=True)
    tokens = loop.run()
    close_to_transformers(tiny, loop, prompts)
    assert tokens["chat"] == tiny.reference_tokens(prompts[0], 10)


def test_a_hidden_state_that_is_not_finite_fails_its_request_alone(tiny, new_loop):
    loop = new_loop(tiny)
    loop.runner._decoder._decoder._embedding[7] = torch.nan
    loop.add("0", [3, 7], 1, embed=True)
    loop.add("1", [3, 4], 1, embed=True)
    loop.run()
    assert (loop.finished["0"].finish_reason, loop.finished["0"].error_kind) == ("error", "internal")
    assert "isn't finite" in loop.finished["0"].error
    assert loop.finished["1"].finish_reason == "stop"


def test_the_longest_prompt_is_the_models_length(tiny, new_loop):
    loop = new_loop(tiny, max_model_len=24)
    loop.add("fits", [5] * 24, 1, embed=True)
    loop.add("too long", [5] * 25, 1, embed=True)
    loop.run()
    torch.testing.assert_close(loop.embedding("fits"), tiny.reference_embedding([5] * 24), **TOLERANCE)
    assert loop.finished["too long"].error_kind == "invalid"
