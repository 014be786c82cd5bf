"""From a validated request body to prompts: chat template, tokens, limits, normalised sampling.

The length of a text bounds its token count from below, so a text that can't fit is refused before it is tokenised.
Large texts are tokenised in a thread; the library releases the GIL.
"""

from __future__ import annotations

import asyncio

from paceline_engine.chat_template import TemplateRefused
from paceline_engine.messages import SamplingParams
from paceline_engine.server.engine import Engine, Prompt, Serving, draw_seed
from paceline_engine.server.errors import ApiError, invalid
from paceline_engine.server.schemas import ChatRequest, CompletionRequest, GenerationRequest

# OpenAI's default for completions.
DEFAULT_COMPLETION_TOKENS = 16
# Below this temperature the softmax is one-hot within float32 and logits / T may overflow: greedy, exactly.
MIN_TEMPERATURE = 1e-5
# Tokenising this many characters takes about a millisecond.
INLINE_CHARS = 8192


async def chat_prompt(engine: Engine, request: ChatRequest, salt: str) -> Prompt:
    """The one prompt of a chat request. Raises ApiError (400)."""
    arrived, serving = engine.clock(), engine.serving
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid("give max_completion_tokens or max_tokens, not both", "max_tokens")
    if serving.template is None:
        raise invalid(
            "this model has no chat template: use /v1/completions, or start the engine with --chat-template", "messages"
        )
    try:
        text = serving.template.render([message.for_template() for message in request.messages])
    except TemplateRefused as error:
        raise invalid(str(error), "messages") from error
    ids = await _encode(serving, text, "messages", add_special_tokens=False)
    room = _room(serving, ids, "messages")
    name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
    wanted = request.max_tokens or request.max_completion_tokens
    return _prompt(serving, request, ids, _limit(serving, ids, wanted or room, name), salt, arrived)


async def completion_prompts(engine: Engine, request: CompletionRequest, salt: str) -> list[Prompt]:
    """One prompt per choice. Raises ApiError (400)."""
    arrived, serving = engine.clock(), engine.serving
    prompts: list[Prompt] = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            ids = await _encode(serving, prompt, "prompt", add_special_tokens=True)
        else:
            ids = _checked_ids(serving, prompt, "prompt")
        wanted = request.max_tokens or min(DEFAULT_COMPLETION_TOKENS, _room(serving, ids, "prompt"))
        limit = _limit(serving, ids, wanted, "max_tokens")
        prompts.append(_prompt(serving, request, ids, limit, salt, arrived))
    return prompts


async def _encode(serving: Serving, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(f"{param} is not valid Unicode: {error.reason}", param) from error
    if serving.tokenizer.is_byte_level and num_bytes > serving.ready.max_model_len * serving.tokenizer.longest_piece:
        raise _too_long(serving, f"{param} has {num_bytes} bytes, which can't fit", param)
    if len(text) <= INLINE_CHARS:
        return serving.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(serving.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _checked_ids(serving: Serving, ids: list[int], param: str) -> list[int]:
    """Ids the model has an embedding for."""
    size = serving.model.config.vocab_size
    wrong = next((token_id for token_id in ids if not 0 <= token_id < size), None)
    if wrong is not None:
        raise invalid(f"{param}: token id {wrong} is outside the vocabulary of {size}", param)
    return ids


def _room(serving: Serving, ids: list[int], param: str) -> int:
    """Tokens left for the output; at least one."""
    if not ids:
        raise invalid(f"{param} is empty: there must be at least one token", param, "empty_prompt")
    room = serving.ready.max_model_len - len(ids)
    if room < 1:
        raise _too_long(serving, f"{param} has {len(ids)} tokens, which leaves no room for output", param)
    return room


def _limit(serving: Serving, ids: list[int], wanted: int, param: str) -> int:
    if wanted > _room(serving, ids, "prompt"):
        raise _too_long(serving, f"the prompt has {len(ids)} tokens and {param} is {wanted}", param)
    return wanted


def _too_long(serving: Serving, what: str, param: str) -> ApiError:
    length = serving.ready.max_model_len
    return invalid(f"this model's context is {length} tokens: {what}: shorten it", param, "context_length_exceeded")


def _prompt(
    serving: Serving, request: GenerationRequest, ids: list[int], limit: int, salt: str, arrived: float
) -> Prompt:
    greedy = request.temperature < MIN_TEMPERATURE
    sampling = SamplingParams(
        max_tokens=limit,
        temperature=0.0 if greedy else request.temperature,
        top_p=1.0 if greedy else request.top_p,
        top_k=0 if greedy else max(request.top_k, 0),
        seed=request.seed if request.seed is not None else draw_seed(),
        stop_token_ids=tuple(_checked_ids(serving, list(request.stop_token_ids), "stop_token_ids")),
        ignore_eos=request.ignore_eos,
    )
    return Prompt(token_ids=ids, sampling=sampling, stops=request.stops, salt=salt, arrived=arrived)
