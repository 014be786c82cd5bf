"""What is to be compiled into a grammar, as sent to the compile worker, and the key equal sources share.

Made in the API process, read in the worker; imports neither torch nor xgrammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from paceline_engine.structured import regexes
from paceline_engine.structured.json_schema import canonical, normalise

MAX_SOURCE_BYTES = 256 * 1024
MAX_CHOICES = 1024


class GrammarSource(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to compile. `text` is by kind: a JSON schema, a regex, EBNF, or a structural tag as JSON.

    patterns: EBNF for the marks in a schema, by number. is_json: a finished output parses as JSON.
    """

    kind: Literal["json", "regex", "grammar", "structural_tag"]
    text: str
    patterns: tuple[str, ...] = ()
    is_json: bool = False

    def key(self, tokenizer_digest: str) -> str:
        """Hex digest of all that the compiled form depends on."""
        parts = (tokenizer_digest, self.kind, self.text, *self.patterns)
        return blake2b(
            b"".join(len(p.encode()).to_bytes(8, "little") + p.encode() for p in parts), digest_size=16
        ).hexdigest()


def json_schema(schema: Any) -> GrammarSource:
    """Values of a JSON schema. Raises SchemaRefused."""
    patterns: list[str] = []
    text = canonical(normalise(schema, patterns))
    return GrammarSource(kind="json", text=text, patterns=tuple(patterns), is_json=True)


def json_object() -> GrammarSource:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> GrammarSource:
    """Texts that match as a whole. Raises RegexRefused."""
    return GrammarSource(kind="regex", text=regexes.checked(pattern))


def choice(choices: Sequence[str]) -> GrammarSource:
    """One of these texts."""
    return GrammarSource(kind="grammar", text="root ::= " + " | ".join(ebnf_literal(text) for text in choices))


def ebnf_literal(text: str) -> str:
    """A text as an EBNF literal."""
    return json.dumps(text, ensure_ascii=True)


def structural_tag(tag: Any) -> GrammarSource:
    """Text with constrained parts, in xgrammar's format. Raises SchemaRefused or RegexRefused for a part of it."""
    patterns: list[str] = []
    text = canonical(_checked(tag, patterns))
    return GrammarSource(kind="structural_tag", text=text, patterns=tuple(patterns))


def _checked(value: Any, patterns: list[str]) -> Any:
    if isinstance(value, dict):
        made = {
            name: normalise(part, patterns) if name == "json_schema" else _checked(part, patterns)
            for name, part in value.items()
        }
        if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
            made["pattern"] = regexes.checked(value["pattern"])
        return made
    return [_checked(part, patterns) for part in value] if isinstance(value, list) else value
