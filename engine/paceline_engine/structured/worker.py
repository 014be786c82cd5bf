"""The process that compiles grammars: one at a time, so that a bad one can be ended with the process.

`python -m paceline_engine.structured.worker`: frames on standard input and output, each four bytes of length (little
endian) and msgpack. First a Setup, answered by the serialised vocabulary when everything is loaded; then a
GrammarSource for each Compiled. Ends with its input. Only this process and the core import xgrammar (and torch with
it).
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from paceline_engine.structured.claims import MAX_WHITESPACE
from paceline_engine.structured.json_schema import PATTERN_MARK
from paceline_engine.structured.source import GrammarSource
from paceline_engine.structured.vocabulary import tokenizer_info

if TYPE_CHECKING:
    import xgrammar

LENGTH_BYTES = 4
# What a compilation may take beyond what is loaded anyway.
MEMORY_BYTES = 2 * 2**30
NICENESS = 5

T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary to compile for."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """The serialised grammar (of a Setup: vocabulary), or one line that says what is wrong with its source."""

    grammar: bytes = b""
    error: str | None = None


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Worker:
    """A compiler for one vocabulary."""

    def __init__(self, setup: Setup) -> None:
        from paceline_engine.grammar import import_xgrammar

        self._xgrammar = import_xgrammar()
        self._info = tokenizer_info(Path(setup.tokenizer_file), setup.vocab_size, setup.eos_token_ids)
        self._compiler = self._xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def vocabulary(self) -> bytes:
        """The serialised vocabulary, for who loads the grammars; to make it anew would stop that process's threads."""
        return self._info.serialize_json().encode()

    def compile(self, source: GrammarSource) -> Compiled:
        """Compile and serialise; what is wrong with the source is in the answer."""
        try:
            compiled = self._compiled(source)
            if not self._can_begin(compiled):
                return Compiled(error="it accepts no text at all")
            return Compiled(grammar=compiled.serialize_json().encode())
        except MemoryError:
            return Compiled(error="it is too large to compile")
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            return Compiled(error=_reason(error))

    def _compiled(self, source: GrammarSource) -> xgrammar.CompiledGrammar:
        grammar = self._xgrammar.Grammar
        match source.kind:
            case "regex":
                return self._compiler.compile_regex(source.text)
            case "grammar":
                return self._compiler.compile_grammar(source.text)
            case "json":
                made = grammar.from_json_schema(source.text, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
            case "structural_tag":
                made = grammar.from_structural_tag(source.text)
        return self._compiler.compile_grammar(_with_patterns(str(made), source.patterns) if source.patterns else made)

    def _can_begin(self, compiled: xgrammar.CompiledGrammar) -> bool:
        """Whether any first token is allowed; also finds grammars that fail only when they are used."""
        matcher = self._xgrammar.GrammarMatcher(compiled)
        mask = self._xgrammar.allocate_token_bitmask(1, self._info.vocab_size)
        return not matcher.fill_next_token_bitmask(mask) or bool(mask.any())


def _with_patterns(ebnf: str, patterns: tuple[str, ...]) -> str:
    """The grammar with the patterns' EBNF where their marks are."""
    for number, pattern in enumerate(patterns):
        ebnf = ebnf.replace(f'Regex("^{PATTERN_MARK}{number}$", json_string=true)', pattern)
    if PATTERN_MARK in ebnf:
        raise ValueError("its patterns can't be placed")
    return ebnf


def _reason(error: Exception) -> str:
    """The library's text without its source position."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rpartition(".cc:")[2].partition(": ")[2] or text if ".cc:" in text else text


def _read(stream: BinaryIO, kind: type[T]) -> T | None:
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little")), type=kind)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Serve until the input ends."""
    # Libraries write to standard output; answers go to a copy of it that nobody else knows.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(NICENESS)
    setup = _read(sys.stdin.buffer, Setup)
    if setup is None:
        return 0
    worker = Worker(setup)
    _limit_memory()
    answer = Compiled(grammar=worker.vocabulary())
    while True:
        answers.write(frame(answer))
        answers.flush()
        source = _read(sys.stdin.buffer, GrammarSource)
        if source is None:
            return 0
        answer = worker.compile(source)


if __name__ == "__main__":
    sys.exit(main())
