"""The public HTTP app: /v1/chat/completions, /v1/completions, /v1/models, /health/{live,ready}."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline_api.wire import HEADER_SALT
from paceline_engine.server.answers import DONE, Answer, error_event, event
from paceline_engine.server.engine import Delta, Engine, Prompt
from paceline_engine.server.errors import ApiError, internal, invalid
from paceline_engine.server.prompts import chat_prompt, completion_prompts
from paceline_engine.server.schemas import ChatRequest, CompletionRequest, GenerationRequest, parse
from paceline_engine.server.transport import (
    ClientGone,
    EventStream,
    InternalToken,
    RequestIds,
    error_response,
    read_body,
    unless_disconnected,
)

MAX_SALT_CHARS = 256
# Deltas of a multi-prompt request that wait for a slow client.
MERGE_QUEUE = 64
# nginx's code for a client that closed the request; nobody sees it but the access log.
CLIENT_CLOSED_REQUEST = 499

R = TypeVar("R", bound=GenerationRequest)
logger = logging.getLogger(__name__)


def build_http_app(engine: Engine, token: str | None) -> FastAPI:
    """The app of the public port."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(InternalToken, token=token)
    app.add_middleware(RequestIds)
    add_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _parsed(engine, request, ChatRequest)
        prompt = await chat_prompt(engine, body, _salt(request))
        return await _answer(engine, request, body, [prompt], chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _parsed(engine, request, CompletionRequest)
        prompts = await completion_prompts(engine, body, _salt(request))
        return await _answer(engine, request, body, prompts, chat=False)

    @app.get("/v1/models")
    async def models() -> Response:
        entry = {
            "id": engine.model_name,
            "object": "model",
            "created": engine.created,
            "owned_by": "paceline",
            "max_model_len": engine.serving.ready.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    @app.get("/health/live")
    async def live() -> Response:
        return _health(engine, engine.not_live())

    @app.get("/health/ready")
    async def ready() -> Response:
        return _health(engine, engine.not_ready())

    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in the shape OpenAI clients parse."""

    @app.exception_handler(ApiError)
    async def on_api_error(_request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientGone)
    async def on_gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(ApiError(error.status_code, message, code="not_found"))

    @app.exception_handler(Exception)
    async def on_bug(_request: Request, error: Exception) -> Response:
        response = error_response(internal(f"unexpected {type(error).__name__}: see the engine's log"))
        # The server closes the connection after a bug. Said beforehand, no client sends its next request into it.
        response.headers["connection"] = "close"
        return response


def _health(engine: Engine, problem: str | None) -> Response:
    body = {"status": "ok" if problem is None else "unavailable", "state": engine.state.value}
    return JSONResponse(body if problem is None else body | {"reason": problem}, 200 if problem is None else 503)


def _salt(request: Request) -> str:
    salt = request.headers.get(HEADER_SALT, "")
    if len(salt) > MAX_SALT_CHARS:
        raise invalid(f"header {HEADER_SALT} is longer than {MAX_SALT_CHARS} characters", HEADER_SALT)
    return salt


async def _parsed(engine: Engine, request: Request, kind: type[R]) -> R:
    engine.refuse_unless_ready()
    try:
        body = parse(kind, await read_body(request))
        if body.model != engine.model_name:
            message = f"model {body.model!r} is not served here: use {engine.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
    except ApiError:
        engine.metrics.on_rejected("invalid")
        raise
    return body


async def _answer(
    engine: Engine, request: Request, body: GenerationRequest, prompts: list[Prompt], *, chat: bool
) -> Response:
    prefix = "chatcmpl" if chat else "cmpl"
    answer = Answer(f"{prefix}-{uuid.uuid4().hex}", engine.model_name, engine.created_now(), chat)
    if not body.stream:
        return await unless_disconnected(request, _whole(engine, answer, prompts))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _events(engine, answer, prompts, include_usage=include_usage)
    # The status line waits for the first event: what fails before it is an HTTP error, not an event.
    first = await unless_disconnected(request, anext(events))  # type: ignore[arg-type]
    return EventStream(_with_first(first, events))


async def _with_first(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk


async def _whole(engine: Engine, answer: Answer, prompts: list[Prompt]) -> Response:
    texts, ends = [""] * len(prompts), [Delta(index, "", 0) for index in range(len(prompts))]
    with engine.admitted(len(prompts)):
        async with aclosing(_merged(engine, prompts)) as deltas:
            async for delta in deltas:
                texts[delta.index] += delta.text
                ends[delta.index] = delta
        return JSONResponse(answer.whole(texts, ends, sum(len(prompt.token_ids) for prompt in prompts)))


async def _events(
    engine: Engine, answer: Answer, prompts: list[Prompt], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream's events; an error after the first is an event too."""
    num_tokens: dict[int, int] = {}
    with engine.admitted(len(prompts)):
        try:
            async with aclosing(_merged(engine, prompts)) as deltas:
                async for delta in deltas:
                    first = delta.index not in num_tokens
                    num_tokens[delta.index] = delta.num_tokens
                    yield event(answer.chunk(delta, first=first, with_usage=include_usage))
        except ApiError as error:
            if not num_tokens:
                raise
            yield error_event(error)
        else:
            if include_usage:
                num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
                yield event(answer.usage_chunk(num_prompt, sum(num_tokens.values())))
        yield DONE


async def _merged(engine: Engine, prompts: list[Prompt]) -> AsyncGenerator[Delta, None]:
    """Deltas of all prompts as they come. The first error ends all of them."""
    queue: asyncio.Queue[Delta | ApiError] = asyncio.Queue(MERGE_QUEUE)

    async def pump(index: int, prompt: Prompt) -> None:
        try:
            async with aclosing(engine.generate(index, prompt)) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
        except ApiError as error:
            await queue.put(error)
        except Exception as error:
            logger.exception("a request failed")
            await queue.put(internal(f"unexpected {type(error).__name__}: see the engine's log"))

    if len(prompts) == 1:
        async with aclosing(engine.generate(0, prompts[0])) as deltas:
            async for delta in deltas:
                yield delta
        return
    tasks = [asyncio.create_task(pump(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        remaining = len(prompts)
        while remaining:
            item = await queue.get()
            if isinstance(item, ApiError):
                raise item
            remaining -= item.finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
