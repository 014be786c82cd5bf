"""Grammars over the tiny model's tokens, which have no tokenizer of their own."""

from __future__ import annotations

from paceline_engine.core_grammars import Constraint
from paceline_engine.grammar import Grammars, GrammarState, import_xgrammar

EOS = (1, 2)
WORDS = ["", "</s>", "<|end|>", "<pad>", *map(chr, range(32, 127)), '{"', '":', '": ', "name", "na", "true", "12"]


class Compiler:
    """Grammars over the tiny model's 199 tokens: two ends, printable ASCII, a few words."""

    def __init__(self, vocab_size: int) -> None:
        self.xgrammar = import_xgrammar()
        self.vocab_size = vocab_size
        self.words = WORDS + [f"<unused{i}>" for i in range(vocab_size - len(WORDS))]
        self.info = self.xgrammar.TokenizerInfo(self.words, vocab_size=vocab_size, stop_token_ids=list(EOS))
        self._compiler = self.xgrammar.GrammarCompiler(self.info)

    def constraint(self, key: str, compiled) -> Constraint:
        return Constraint(key=key, grammar=compiled.serialize_json().encode())

    def regex(self, pattern: str) -> Constraint:
        return self.constraint(pattern, self._compiler.compile_regex(pattern))

    def ebnf(self, text: str) -> Constraint:
        return self.constraint(text, self._compiler.compile_grammar(text))

    def schema(self, schema: str) -> Constraint:
        return self.constraint(schema, self._compiler.compile_json_schema(schema, any_whitespace=False))

    def grammars(self) -> Grammars:
        made = Grammars(self.vocab_size, EOS)
        made.prepare(self.info.serialize_json().encode())
        return made

    def matcher(self, constraint: Constraint, stops, output) -> GrammarState:
        grammars = self.grammars()
        grammars.load(0, constraint.grammar, lambda num_bytes, error: None)
        return grammars.matcher(0, stops, output)

    def text(self, token_ids) -> str:
        return "".join(self.words[i] for i in token_ids)

    def ids(self, text: str) -> list[int]:
        return [self.words.index(char) for char in text]
