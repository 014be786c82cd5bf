"""The fields of a request that constrain its output, OpenAI's and vLLM's, and the one grammar they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline_engine.core_grammars import Constraint, CoreGrammars, GrammarRefused
from paceline_engine.server.errors import internal, invalid, unavailable
from paceline_engine.structured import source as sources
from paceline_engine.structured.compiler import CompilerBusy, CompileRefused, CompilerFailed, GrammarCompiler
from paceline_engine.structured.json_schema import SchemaRefused
from paceline_engine.structured.regexes import RegexRefused
from paceline_engine.structured.source import MAX_CHOICES, MAX_SOURCE_BYTES, GrammarSource

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
Text = Annotated[str, Field(min_length=1)]
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=False)


class JsonSchemaFormat(_Strict):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's response_format; structural_tag is xgrammar's format, as in vLLM."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(_Strict):
    """vLLM's structured_outputs: exactly one field."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: str | dict[str, Any] | None = None


class GuidedFields(_Strict):
    """Fields of a request; at most one of them may constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @property
    def constrained_by(self) -> str | None:
        """Name of the field that constrains the output."""
        return next((name for name, _, _ in self._asked()), None)

    def _asked(self) -> list[tuple[str, str, Any]]:
        """(field, kind, value) of everything that asks for a constraint."""
        asked: list[tuple[str, str, Any]] = []
        form = self.response_format
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise invalid("response_format.json_schema is missing", "response_format.json_schema")
            asked.append(("response_format.json_schema.schema", "json", form.json_schema.schema_))
        elif form is not None and form.type == "structural_tag":
            asked.append(("response_format", "structural_tag", {"type": "structural_tag", "format": form.format}))
        elif form is not None and form.type == "json_object":
            asked.append(("response_format", "json_object", True))
        options = self.structured_outputs
        for kind in KINDS if options is not None else ():
            value = getattr(options, "json_" if kind == "json" else kind)
            if value is not None and value is not False:
                asked.append((f"structured_outputs.{kind}", kind, value))
        if options is not None and not asked:
            raise invalid(f"structured_outputs needs one of {', '.join(KINDS)}", "structured_outputs")
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                asked.append((f"guided_{kind}", kind, value))
        return asked

    def grammar_source(self) -> tuple[str, GrammarSource] | None:
        """(field, what to compile), or None if nothing constrains the output. Raises ApiError (400)."""
        asked = self._asked()
        if len(asked) > 1:
            raise invalid(
                f"{asked[0][0]} and {asked[1][0]} can't both constrain the output: leave one out", asked[1][0]
            )
        if not asked:
            return None
        ((field, kind, value),) = asked
        return field, make_source(field, lambda: _MAKERS[kind](value))


def make_source(field: str, make: Callable[[], GrammarSource]) -> GrammarSource:
    """What `make` makes. Raises ApiError (400) that names the field and points into the schema."""
    try:
        source = make()
    except SchemaRefused as error:
        raise invalid(f"{field}: {error}", field, "unsupported_schema") from error
    except RegexRefused as error:
        raise invalid(f"{field}: {error}", field, "invalid_grammar") from error
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field} is not valid JSON: {error}", field, "invalid_value") from error
    try:
        size = len(source.text.encode())
    except UnicodeEncodeError as error:
        raise invalid(f"{field} is not valid Unicode: {error.reason}", field, "invalid_value") from error
    if size > MAX_SOURCE_BYTES:
        raise invalid(f"{field} is larger than {MAX_SOURCE_BYTES // 1024} KiB", field, "invalid_value")
    return source


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


_MAKERS: dict[str, Callable[[Any], GrammarSource]] = {
    "json": lambda value: sources.json_schema(_decoded(value)),
    "json_object": lambda _: sources.json_object(),
    "regex": sources.regex,
    "choice": sources.choice,
    "grammar": lambda value: GrammarSource(kind="grammar", text=value),
    "structural_tag": lambda value: sources.structural_tag(_decoded(value)),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint ready for the core. is_json: a finished output parses as JSON."""

    constraint: Constraint
    is_json: bool


async def compile_source(
    compiler: GrammarCompiler, grammars: CoreGrammars, field: str, source: GrammarSource
) -> Compiled:
    """Compile within the compiler's limits, and have the core load it, so that no step ever waits for that.

    Raises ApiError: 400 for the source's faults, 500 and 503 for ours.
    """
    try:
        constraint = await compiler.compile(source)
        await grammars.ready(constraint)
        return Compiled(constraint, source.is_json)
    except GrammarRefused as error:
        raise internal(f"{field}: {error}") from error
    except CompileRefused as error:
        raise invalid(f"{field}: {error}", field, "invalid_grammar") from error
    except CompilerBusy as error:
        raise unavailable(f"{error}: try again later", "queue_full", 1) from error
    except CompilerFailed as error:
        raise unavailable(str(error), "compiler_failed") from error
