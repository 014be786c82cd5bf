"""/v1/embeddings in OpenAI's shape: the last token's hidden state behind the last norm, as a unit vector.

Each input is a request of its own to the core, under the same budget, deadlines and priorities as a chat. Only some of
one body's inputs are with the core at once, so that a large body doesn't fill the queue before everybody else.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from paceline_engine.messages import RequestOutput, SamplingParams
from paceline_engine.server.answers import cached_details
from paceline_engine.server.caller import Caller, caller_of
from paceline_engine.server.engine import Engine, Serving
from paceline_engine.server.errors import ApiError, invalid
from paceline_engine.server.generation import Prompt, raise_unless_regular, submit
from paceline_engine.server.parsing import parsed
from paceline_engine.server.prompts import INLINE_CHARS, check_length, too_long
from paceline_engine.server.sampling import checked_ids
from paceline_engine.server.schemas import MAX_SALT_CHARS, Count, Ids, StrictModel
from paceline_engine.server.transport import unless_disconnected

MAX_INPUTS = 2048
# Inputs of one body that are with the core at once.
AT_ONCE = 64


class EmbeddingRequest(StrictModel):
    """OpenAI's fields, and ours as in a chat request. dimensions: the vector is cut to these and made a unit again."""

    model: str
    input: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    add_special_tokens: bool = True
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field(default="", max_length=MAX_SALT_CHARS)
    deadline_ms: Count | None = None
    user: str | None = None

    @property
    def inputs(self) -> list[tuple[str, str | list[int]]]:
        """(name for errors, input)."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [("input", self.input)]  # type: ignore[list-item]
        return [(f"input[{index}]", given) for index, given in enumerate(self.input)]  # type: ignore[misc]


def add_embedding_route(app: FastAPI, engine: Engine) -> None:
    """Add the route to the public app."""

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await parsed(engine, request, EmbeddingRequest)
        return await unless_disconnected(request, _answer(engine, body, caller_of(request)))


async def _answer(engine: Engine, body: EmbeddingRequest, caller: Caller) -> Response:
    try:
        prompts = await _prompts(engine, body, caller)
    except ApiError:
        engine.metrics.on_rejected("invalid")
        raise
    with engine.admitted(1):
        outputs = await _embed_all(engine, prompts)
    data: list[msgspec.Raw] = []
    for index, output in enumerate(outputs):
        vector = encoded(output.embedding, body.dimensions, body.encoding_format)
        data.append(msgspec.Raw(msgspec.json.encode({"object": "embedding", "index": index, "embedding": vector})))
        await asyncio.sleep(0)  # Thousands of vectors in one piece would hold everybody's streams up.
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    usage = {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": cached_details((output.num_cached_tokens, output.loaded_tokens) for output in outputs),
    }
    answer = {"object": "list", "data": data, "model": body.model, "usage": usage}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _prompts(engine: Engine, body: EmbeddingRequest, caller: Caller) -> list[Prompt]:
    arrived, serving = engine.clock(), engine.serving
    size = serving.model.config.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(f"dimensions: this model's embeddings have {size}: ask for 1 to {size}", "dimensions")
    return [
        Prompt(
            token_ids=ids,
            sampling=SamplingParams(max_tokens=1),
            arrived=arrived,
            request_id=caller.request_id,
            salt=caller.salt or body.cache_salt,
            tenant=caller.tenant,
            priority=body.priority if caller.priority is None else caller.priority,
            e2e_at=caller.end_of(arrived, body.deadline_ms),
            adapter=None if body.model == engine.model_name else body.model,
            embed=True,
        )
        for ids in await _token_ids(serving, body.inputs, add_special_tokens=body.add_special_tokens)
    ]


async def _token_ids(
    serving: Serving, inputs: Sequence[tuple[str, str | list[int]]], *, add_special_tokens: bool
) -> list[list[int]]:
    """Ids of each input, at least one and at most what the model takes. Raises ApiError (400)."""
    for name, given in inputs:
        if isinstance(given, str):
            check_length(serving, given, name)

    def tokenise() -> list[list[int]]:
        return [
            serving.tokenizer.encode(given, add_special_tokens=add_special_tokens)
            if isinstance(given, str)
            else checked_ids(serving, given, name)
            for name, given in inputs
        ]

    num_chars = sum(len(given) for _, given in inputs)
    made = tokenise() if num_chars <= INLINE_CHARS else await asyncio.to_thread(tokenise)
    for (name, given), ids in zip(inputs, made, strict=True):
        if not given or not ids:
            raise invalid(f"{name} is empty: there must be at least one token", name, "empty_prompt")
        if len(ids) > serving.ready.max_model_len:
            raise too_long(serving, f"{name} has {len(ids)} tokens", name)
    return made


async def _embed_all(engine: Engine, prompts: Sequence[Prompt]) -> list[RequestOutput]:
    """The prompts' outputs, in order. The first error ends all of them."""
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    waiting = deque(range(len(prompts)))
    active = 0

    async def work() -> None:
        nonlocal active
        active += 1
        try:
            # A full queue is no error while others of ours are in it: they go on.
            while waiting and (active == 1 or engine.serving.core.room_for(1)):
                index = waiting.popleft()
                outputs[index] = await _embed(engine, prompts[index])
        finally:
            active -= 1

    workers = [asyncio.create_task(work()) for _ in range(min(AT_ONCE, len(prompts)))]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        for worker in workers:
            if worker.done():
                worker.result()
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [output for output in outputs if output is not None]


async def _embed(engine: Engine, prompt: Prompt) -> RequestOutput:
    stream = submit(engine, prompt)
    reason = "abort"
    try:
        # The first output is the last.
        output = (await stream.next())[0].output
        reason = output.finish_reason or "error"
        raise_unless_regular(engine, output, reason)
        return output
    finally:
        stream.close()
        engine.metrics.on_finished(reason, engine.clock() - prompt.arrived, 0, 0.0)


def encoded(embedding: bytes, dimensions: int | None, form: str) -> Any:
    """A unit vector of that many dimensions: numbers, or base64 of float32 in little endian."""
    size = len(embedding) // 4
    if dimensions is not None and dimensions < size:
        values = struct.unpack(f"<{dimensions}f", embedding[: 4 * dimensions])
        norm = math.sqrt(sum(value * value for value in values)) or 1.0
        embedding = struct.pack(f"<{dimensions}f", *(value / norm for value in values))
    if form == "base64":
        return base64.b64encode(embedding).decode()
    return struct.unpack(f"<{len(embedding) // 4}f", embedding)
