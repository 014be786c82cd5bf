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

from paceline_engine.models.errors import ModelError


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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. By default it ends where the assistant's answer begins.

        continue_final_message: it ends with the last message's content, so that the model writes on. variables: what
        else the template may use; they never replace what it is given anyway. Raises TemplateRefused.
        """
        variables = variables or {}
        taken = variables.keys() & {*self._special_tokens, "messages", "documents"}
        if taken:
            raise TemplateRefused(f"{min(taken)!r} can't be given to the chat template: it has its own")
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": [dict(message) for message in messages],
                    "tools": [dict(tool) for tool in tools] if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error
        return _cut_behind(text, str(messages[-1]["content"])) if continue_final_message else text


def _cut_behind(text: str, content: str) -> str:
    """`text` up to the end of its last `content`."""
    content = content.rstrip()
    at = text.rfind(content)
    if not content or at < 0:
        raise TemplateRefused("can't continue the last message: the chat template does not keep its content")
    return text[: at + len(content)]
