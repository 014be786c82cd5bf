"""Normalised sampling parameters of a request's choices: ids checked, words tokenised, seeds drawn, once.

OpenAI's defaults. Greedy requests lose what has no effect on them, so that the core need not look at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

from msgspec import structs

from paceline_engine.messages import SamplingParams
from paceline_engine.server.engine import Serving, draw_seed
from paceline_engine.server.errors import invalid
from paceline_engine.server.generation import Prompt
from paceline_engine.server.schemas import CompletionRequest, GenerationRequest

# Below this temperature the softmax is one-hot within float32 and logits / T may overflow: greedy, exactly.
MIN_TEMPERATURE = 1e-5


def choices(
    serving: Serving, request: GenerationRequest, prompt: Prompt, max_tokens: int, hidden: frozenset[int] | None
) -> Iterator[Prompt]:
    """`prompt` n times, each with a seed of its own. Raises ApiError (400)."""
    params = sampling_params(serving, request, max_tokens)
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        params = structs.replace(params, prompt_logprobs=max(request.logprobs, request.prompt_logprobs or 0))
    if prompt.lends:
        params = structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))
    seed = request.seed if request.seed is not None else draw_seed()
    for child in range(request.n):
        # One lease is for one load; the other choices find what the first has loaded.
        handoff = prompt.handoff if child == 0 else None
        sampling = structs.replace(params, seed=child_seed(seed, child))
        yield replace(prompt, sampling=sampling, hidden=hidden, handoff=handoff)


def child_seed(seed: int, child: int) -> int:
    """The seed of one of several choices; the first has the request's own. Signed 64 bits."""
    if child == 0:
        return seed
    digest = blake2b(f"{seed}:{child}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def sampling_params(serving: Serving, request: GenerationRequest, max_tokens: int) -> SamplingParams:
    """What the core samples by, but the seed. Raises ApiError (400)."""
    greedy = request.temperature < MIN_TEMPERATURE
    if greedy and request.n > 1:
        raise invalid("n: at temperature 0 all choices are the same: raise the temperature or ask for one", "n")
    if request.min_tokens > max_tokens:
        raise invalid(f"min_tokens {request.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    bias = {int(key): value for key, value in request.logit_bias.items()}
    checked_ids(serving, list(bias), "logit_bias")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else request.temperature,
        top_p=1.0 if greedy else request.top_p,
        top_k=0 if greedy else max(request.top_k, 0),
        min_p=0.0 if greedy else request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=tuple(sorted(bias.items())),
        allowed_token_ids=_allowed(serving, request),
        bad_words=bad_words(serving, request.bad_words),
        stop_token_ids=tuple(checked_ids(serving, list(request.stop_token_ids), "stop_token_ids")),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )


def _allowed(serving: Serving, request: GenerationRequest) -> tuple[int, ...]:
    return tuple(sorted(set(checked_ids(serving, list(request.allowed_token_ids or ()), "allowed_token_ids"))))


def bad_words(serving: Serving, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Ids of each word as it stands at the beginning of a text and behind a space, as vLLM reads them."""
    made: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}"):
            ids = tuple(serving.tokenizer.encode(text, add_special_tokens=False))
            if not bare or not ids:
                raise invalid(f"bad_words: {word!r} has no tokens", "bad_words")
            made[ids] = None
    return tuple(made)


def checked_ids(serving: Serving, ids: list[int], param: str) -> list[int]:
    """Ids the model has an embedding for. Raises ApiError (400)."""
    size = serving.model.config.vocab_size
    wrong = next((token_id for token_id in ids if not 0 <= token_id < size), None)
    if wrong is not None:
        raise invalid(f"{param}: token id {wrong} is outside the vocabulary of {size}", param)
    return ids
