"""From a validated request body to prompts: chat template, tokens, limits, tools, constraint.

The length of a text bounds its token count from below, so a text that can't fit is refused before it is tokenised.
Large texts are tokenised in a thread; the library releases the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline_engine.chat_template import ChatTemplate, TemplateRefused
from paceline_engine.messages import SamplingParams
from paceline_engine.models.errors import ModelError
from paceline_engine.server.caller import Caller
from paceline_engine.server.chat_schemas import ChatRequest, NamedTool, TemplateFields, Tool
from paceline_engine.server.constraints import Compiled, compile_source, make_source
from paceline_engine.server.engine import Engine, Serving
from paceline_engine.server.errors import ApiError, invalid
from paceline_engine.server.generation import Prompt
from paceline_engine.server.sampling import checked_ids, choices
from paceline_engine.server.schemas import CompletionRequest, GenerationRequest
from paceline_engine.structured import source as sources
from paceline_engine.structured.source import GrammarSource
from paceline_engine.tools.grammar import arguments_schema, forced_calls, free_calls
from paceline_engine.tools.parsers import MARKERS

# OpenAI's default for completions.
DEFAULT_COMPLETION_TOKENS = 16
# Tokenising this many characters takes about a millisecond.
INLINE_CHARS = 8192


async def chat_prompts(engine: Engine, request: ChatRequest, caller: Caller) -> list[Prompt]:
    """The choices of a chat request. Raises ApiError."""
    arrived, serving = engine.clock(), engine.serving
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid("give max_completion_tokens or max_tokens, not both", "max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs=true: leave it out or set that", "top_logprobs")
    tools = offered_tools(serving, request)
    asked = request.grammar_source() or _tool_source(serving, request, tools)
    text = render(serving, request, tools)
    ids = await encode(serving, text, "messages", add_special_tokens=request.add_special_tokens)
    name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
    wanted = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    if wanted == 0:
        raise invalid("max_tokens must be at least 1", name)
    limit = _limit(serving, ids, wanted or _room(serving, ids, "messages"), name)
    prompt = _prompt(engine, request, caller, ids, arrived, await _compiled(serving, asked))
    hidden = _hidden(serving, request, parses_tools=bool(tools))
    return list(choices(serving, request, prompt, limit, hidden))


async def completion_prompts(engine: Engine, request: CompletionRequest, caller: Caller) -> list[Prompt]:
    """The choices of all prompts, those of one prompt together. Raises ApiError."""
    arrived, serving = engine.clock(), engine.serving
    only = request.max_tokens == 0
    if only and not request.echo:
        raise invalid("max_tokens must be at least 1, or 0 with echo", "max_tokens")
    compiled = await _compiled(serving, request.grammar_source())
    made: list[Prompt] = []
    for number, given in enumerate(request.prompts):
        if isinstance(given, str):
            ids = await encode(serving, given, "prompt", add_special_tokens=request.add_special_tokens)
        else:
            ids = checked_ids(serving, given, "prompt")
        room = _room(serving, ids, "prompt")
        wanted = 1 if only else request.max_tokens or min(DEFAULT_COMPLETION_TOKENS, room)
        limit = _limit(serving, ids, wanted, "max_tokens")
        echo = None
        if request.echo:
            echo = given if isinstance(given, str) else serving.tokenizer.decode(ids, skip_special_tokens=False)
        prompt = _prompt(engine, request, caller, ids, arrived, compiled, number=number, echo=echo, prompt_only=only)
        made += choices(serving, request, prompt, limit, _hidden(serving, request, parses_tools=False))
    return made


def render(serving: Serving, request: TemplateFields, tools: Sequence[Tool] = ()) -> str:
    """The prompt's text by the chat template. Raises ApiError (400)."""
    template = _template(serving, request)
    if (
        request.continue_final_message
        and request.add_generation_prompt
        and "add_generation_prompt" in request.model_fields_set
    ):
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    messages = [message.for_template(f"messages[{index}]") for index, message in enumerate(request.messages)]
    try:
        return template.render(
            messages,
            tools=[tool.model_dump(exclude_none=True) for tool in tools],
            add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            variables=_checked_kwargs(request.chat_template_kwargs),
        )
    except TemplateRefused as error:
        raise invalid(str(error), "messages") from error


def _template(serving: Serving, request: TemplateFields) -> ChatTemplate:
    if request.chat_template is not None:
        if serving.make_template is None:
            message = "this engine takes no chat_template of a request: start it with --trust-request-chat-template"
            raise invalid(message, "chat_template", "unsupported_parameter")
        try:
            return serving.make_template(request.chat_template)
        except ModelError as error:
            raise invalid(str(error), "chat_template", "invalid_value") from error
    if serving.template is None:
        raise invalid(
            "this model has no chat template: use /v1/completions, or start the engine with --chat-template", "messages"
        )
    return serving.template


def _checked_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    own = given.keys() & {"messages", "tools", "add_generation_prompt", "continue_final_message", "documents"}
    if own:
        name = min(own)
        raise invalid(f"chat_template_kwargs.{name}: give {name} as a parameter of its own", "chat_template_kwargs")
    return given


def offered_tools(serving: Serving, request: ChatRequest) -> list[Tool]:
    """The tools that the model is shown. Raises ApiError (400)."""
    choice = request.tool_choice
    if not request.tools:
        if isinstance(choice, NamedTool) or choice == "required":
            raise invalid("tool_choice needs tools: give them", "tool_choice")
        return []
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise invalid("tools: two functions have the same name", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(f"tool_choice: there is no tool {choice.function.name!r} in tools", "tool_choice")
    if choice == "none":
        return []
    if serving.tool_format is None:
        raise invalid(
            "this model's chat template teaches no tools: use another model, or start the engine with --chat-template "
            "and --tool-call-parser",
            "tools",
            "unsupported_parameter",
        )
    if not serving.auto_tools and choice in (None, "auto"):
        raise invalid(
            "tool_choice: this engine runs with --no-enable-auto-tool-choice: give none, required or a function",
            "tool_choice",
            "unsupported_parameter",
        )
    return request.tools


def _tool_source(serving: Serving, request: ChatRequest, tools: Sequence[Tool]) -> tuple[str, GrammarSource] | None:
    """What tool_choice and strict tools make of the output; None leaves it free. Raises ApiError (400)."""
    choice, form = request.tool_choice, serving.tool_format
    named = choice.function.name if isinstance(choice, NamedTool) else None
    forced = named is not None or choice == "required"
    if form is None or not (forced or any(tool.function.strict for tool in tools)):
        return None

    def make() -> GrammarSource:
        wanted = [
            (tool.function.name, arguments_schema(tool.function.parameters, strict=bool(tool.function.strict)))
            for tool in tools
            if named in (None, tool.function.name)
        ]
        several = request.parallel_tool_calls and named is None
        return sources.structural_tag(
            forced_calls(form, wanted, several=several) if forced else free_calls(form, wanted)
        )

    return "tools", make_source("tools", make)


async def _compiled(serving: Serving, asked: tuple[str, GrammarSource] | None) -> Compiled | None:
    if asked is None:
        return None
    if not serving.ready.follows_constraints:
        raise invalid(f"{asked[0]}: this engine's device can't follow constraints: leave it out", asked[0])
    return await compile_source(serving.compiler, serving.core.grammars, *asked)


def _hidden(serving: Serving, request: GenerationRequest, *, parses_tools: bool) -> frozenset[int] | None:
    """Ids without text: special tokens, but those that a tool parser must see."""
    if not request.skip_special_tokens:
        return frozenset()
    if not parses_tools or serving.tool_format is None:
        return None
    return serving.tokenizer.special_ids - serving.tokenizer.ids_of(MARKERS[serving.tool_format])


def _prompt(
    engine: Engine,
    request: GenerationRequest,
    caller: Caller,
    ids: list[int],
    arrived: float,
    compiled: Compiled | None,
    **more: Any,
) -> Prompt:
    """What the choices of one prompt share; the router's headers win over the body."""
    transfer = request.kv_transfer_params
    lends = transfer is not None and transfer.do_remote_decode
    if lends and not engine.serving.ready.lends:
        raise invalid(
            "kv_transfer_params.do_remote_decode: this engine has no tier that other engines reach: give it a node "
            "server or S3 with --kv-store-config, or leave this out",
            "kv_transfer_params.do_remote_decode",
            "unsupported_parameter",
        )
    ttft = request.ttft_deadline_ms
    return Prompt(
        token_ids=ids,
        sampling=SamplingParams(max_tokens=1),
        arrived=arrived,
        request_id=caller.request_id,
        stops=request.stops,
        keep_stop=request.include_stop_str_in_output,
        salt=caller.salt or request.cache_salt,
        tenant=caller.tenant,
        priority=request.priority if caller.priority is None else caller.priority,
        ttft_at=None if ttft is None else arrived + ttft / 1000,
        e2e_at=caller.end_of(arrived, request.deadline_ms),
        constraint=compiled,
        with_kinds=request.return_token_kinds,
        traffic_class=request.traffic_class,
        streamed=request.stream,
        lends=lends,
        handoff=None if transfer is None else transfer.handoff,
        adapter=None if request.model == engine.model_name else request.model,
        **more,
    )


async def encode(serving: Serving, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text that may fit into the model's context. Raises ApiError (400)."""
    check_length(serving, text, param)
    if len(text) <= INLINE_CHARS:
        return serving.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(serving.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def check_length(serving: Serving, text: str, param: str) -> None:
    """Raises ApiError (400) for a text that can't fit into the model's context, whatever its tokens are."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(f"{param} is not valid Unicode: {error.reason}", param) from error
    if serving.tokenizer.is_byte_level and num_bytes > serving.ready.max_model_len * serving.tokenizer.longest_piece:
        raise too_long(serving, f"{param} has {num_bytes} bytes, which can't fit", param)


def _room(serving: Serving, ids: list[int], param: str) -> int:
    """Tokens left for the output; at least one."""
    if not ids:
        raise invalid(f"{param} is empty: there must be at least one token", param, "empty_prompt")
    room = serving.ready.max_model_len - len(ids)
    if room < 1:
        raise too_long(serving, f"{param} has {len(ids)} tokens, which leaves no room for output", param)
    return room


def _limit(serving: Serving, ids: list[int], wanted: int, param: str) -> int:
    if wanted > _room(serving, ids, "prompt"):
        raise too_long(serving, f"the prompt has {len(ids)} tokens and {param} is {wanted}", param)
    return wanted


def too_long(serving: Serving, what: str, param: str) -> ApiError:
    """The error of a prompt that the model's context can't hold."""
    length = serving.ready.max_model_len
    return invalid(f"this model's context is {length} tokens: {what}: shorten it", param, "context_length_exceeded")
