"""Renders a model's chat template (Jinja) in a sandbox, with the names Hugging Face templates expect.

Templates are data from a model's author: no attribute of a Python object is reachable, nothing can be changed, and
values are plain JSON. Templates that call `strftime_now` get the wall clock from the caller. No transformers, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline_engine.models.source import ModelError


class TemplateRefused(ValueError):
    """The template rejects these messages; the text is the template's own."""


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training masks; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The tag's body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template. Raises ModelError if it does not compile."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ModelError(f"chat template does not compile: {error}: give another with --chat-template") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that ends where the assistant's answer begins. Raises TemplateRefused."""
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error
