"""A vocabulary of single bytes for the grammar compiler, and outputs drawn at random from a grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from paceline_engine.structured.source import GrammarSource
from paceline_engine.structured.vocabulary import tokenizer_info
from paceline_engine.structured.worker import Setup, Worker
from paceline_engine.tokenizer import byte_alphabet

EOS = 256
VOCAB_SIZE = 257
CLOSING = frozenset(b'"}],:0123456789')


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Ids 0 to 255 are the bytes, 256 ends a sequence."""
    folder = tmp_path_factory.mktemp("bytes")
    rust = RustTokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("</s>", special=True)])
    rust.save(str(folder / "tokenizer.json"))
    return Setup(tokenizer_file=str(folder / "tokenizer.json"), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


class Grammars:
    """Compiles in this process and reads the result back, as the core does."""

    def __init__(self, setup: Setup) -> None:
        self._worker = Worker(setup)
        self._info = tokenizer_info(Path(setup.tokenizer_file), setup.vocab_size, setup.eos_token_ids)

    def matcher(self, source: GrammarSource) -> xgrammar.GrammarMatcher:
        compiled = self._worker.compile(source)
        assert compiled.error is None, (source, compiled.error)
        loaded = xgrammar.CompiledGrammar.deserialize_json(compiled.grammar.decode(), self._info)
        return xgrammar.GrammarMatcher(loaded)

    def error(self, source: GrammarSource) -> str | None:
        return self._worker.compile(source).error

    def accepts(self, matcher: xgrammar.GrammarMatcher, text: str) -> bool:
        matcher.reset()
        return matcher.accept_string(text) and matcher.is_completed()

    def accepted(self, source: GrammarSource, texts: Sequence[str]) -> set[str]:
        matcher = self.matcher(source)
        return {text for text in texts if self.accepts(matcher, text)}

    def draw(self, matcher: xgrammar.GrammarMatcher, dice: random.Random, limit: int = 300) -> bytes | None:
        """A random output, or None if it does not end within `limit` bytes. Fails where nothing is allowed."""
        matcher.reset()
        mask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
        out = bytearray()
        while len(out) < limit:
            matcher.fill_next_token_bitmask(mask)
            bits = mask[0].tolist()
            allowed = [token for token in range(VOCAB_SIZE) if bits[token // 32] >> (token % 32) & 1]
            assert allowed, f"nothing may follow {bytes(out)!r}"
            if EOS in allowed and (len(allowed) == 1 or dice.random() < 0.3):
                return bytes(out)
            plain = [token for token in allowed if 0x20 <= token < 0x7F]
            closing = [token for token in plain if token in CLOSING]
            late = len(out) > limit // 6 and dice.random() < 0.8
            out.append(dice.choice(closing if closing and late else plain or [t for t in allowed if t != EOS]))
            assert matcher.accept_token(out[-1])
        return None


@pytest.fixture(scope="session")
def grammars(setup: Setup) -> Grammars:
    return Grammars(setup)


@pytest.fixture(scope="session")
def suite() -> dict[str, Any]:
    """{file: [[schema, [[value, is valid]]]]} of the JSON Schema Test Suite."""
    return json.loads((Path(__file__).parent / "json_schema_suite.json").read_text("utf-8"))


@pytest.fixture
def dice() -> Callable[[int], random.Random]:
    return random.Random
