"""The public HTTP app: chat and text completions, models, health; other routes have modules of their own."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline_engine.server.answers import DONE, Answer, Choice, error_event, event
from paceline_engine.server.caller import caller_of
from paceline_engine.server.chat_schemas import ChatRequest
from paceline_engine.server.embeddings import add_embedding_route
from paceline_engine.server.engine import Engine
from paceline_engine.server.errors import ApiError, internal
from paceline_engine.server.generation import Delta, Prompt, generate
from paceline_engine.server.logprobs import CompletionLogprobs
from paceline_engine.server.parsing import parsed
from paceline_engine.server.prompts import chat_prompts, completion_prompts, offered_tools
from paceline_engine.server.schemas import CompletionRequest, GenerationRequest
from paceline_engine.server.text_routes import add_text_routes
from paceline_engine.server.transport import (
    ClientGone,
    EventStream,
    InternalToken,
    RequestIds,
    error_response,
    unless_disconnected,
)
from paceline_engine.tools.parsers import PARSERS

# Deltas of a request with several choices that wait for a slow client.
MERGE_QUEUE = 64
# nginx's code for a client that closed the request; nobody sees it but the access log.
CLIENT_CLOSED_REQUEST = 499

logger = logging.getLogger(__name__)


def build_http_app(engine: Engine, token: str | None) -> FastAPI:
    """The app of the public port."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(InternalToken, token=token)
    app.add_middleware(RequestIds)
    add_error_handlers(app)
    add_text_routes(app, engine)
    add_embedding_route(app, engine)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await parsed(engine, request, ChatRequest)
        prompts = await _checked(engine, request, chat_prompts(engine, body, caller_of(request)))
        return await _answer(engine, request, body, prompts)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await parsed(engine, request, CompletionRequest)
        prompts = await _checked(engine, request, completion_prompts(engine, body, caller_of(request)))
        return await _answer(engine, request, body, prompts)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": list(_models(engine).values())})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        found = _models(engine).get(name)
        if found is None:
            raise ApiError(404, f"model {name!r} is not served here", param="model", code="model_not_found")
        return JSONResponse(found)

    @app.get("/health/live")
    async def live() -> Response:
        return _health(engine, engine.not_live())

    @app.get("/health/ready")
    async def ready() -> Response:
        return _health(engine, engine.not_ready())

    return app


def _models(engine: Engine) -> dict[str, dict[str, Any]]:
    """What is served, by name: the model and its adapters."""
    served: list[tuple[str, int, str | None]] = [(engine.model_name, engine.created, None)]
    served += [(name, created, engine.model_name) for name, created in engine.adapters.items()]
    about = {"object": "model", "owned_by": "paceline", "max_model_len": engine.serving.ready.max_model_len}
    return {name: {"id": name, "created": created, "parent": parent} | about for name, created, parent in served}


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


async def _checked(engine: Engine, request: Request, work: object) -> list[Prompt]:
    """The prompts; a refusal is counted, and a client that goes away ends the wait."""
    try:
        return await unless_disconnected(request, work)  # type: ignore[arg-type]
    except ApiError as error:
        if error.status == 400:
            engine.metrics.on_rejected("invalid")
        raise


async def _answer(engine: Engine, request: Request, body: GenerationRequest, prompts: list[Prompt]) -> Response:
    answer = _new_answer(engine, body, prompts)
    if not body.stream:
        return await unless_disconnected(request, _whole(engine, answer, prompts))
    events = _events(engine, answer, prompts, body)
    # The status line waits for the first event: what fails before it is an HTTP error, not an event.
    first = await unless_disconnected(request, anext(events))  # type: ignore[arg-type]
    return EventStream(_with_first(first, events))


def _new_answer(engine: Engine, body: GenerationRequest, prompts: list[Prompt]) -> Answer:
    tokenizer, form = engine.serving.tokenizer, engine.serving.tool_format
    chat = isinstance(body, ChatRequest)
    names: list[str] = []
    if isinstance(body, ChatRequest):
        names = [tool.function.name for tool in offered_tools(engine.serving, body)]
    choices = [
        Choice(
            prompt=prompt,
            parser=PARSERS[form](names) if names and form is not None else None,
            completion_logprobs=CompletionLogprobs(tokenizer),
            one_call=isinstance(body, ChatRequest) and not body.parallel_tool_calls,
        )
        for prompt in prompts
    ]
    prefix = "chatcmpl" if chat else "cmpl"
    return Answer(f"{prefix}-{uuid.uuid4().hex}", body.model, engine.created_now(), chat, tokenizer, choices)


async def _with_first(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk


async def _whole(engine: Engine, answer: Answer, prompts: list[Prompt]) -> Response:
    with engine.admitted(len(prompts)):
        async with aclosing(_merged(engine, prompts)) as deltas:
            async for delta in deltas:
                answer.choices[delta.index].take(delta)
        return JSONResponse(answer.whole())


async def _events(
    engine: Engine, answer: Answer, prompts: list[Prompt], body: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """The stream's events; an error after the first is an event too."""
    options = body.stream_options
    usage_of = None
    if options is not None and options.continuous_usage_stats:
        usage_of = answer.usage_now
    elif options is not None and options.include_usage:
        usage_of = _no_usage_yet
    begun = False
    with engine.admitted(len(prompts)):
        try:
            async with aclosing(_merged(engine, prompts)) as deltas:
                async for delta in deltas:
                    for chunk in answer.chunks(delta, usage_of):
                        begun = True
                        yield event(chunk)
        except ApiError as error:
            if not begun:
                raise
            yield error_event(error)
        else:
            if options is not None and options.include_usage:
                yield event(answer.usage_chunk(answer.usage_now()))
        yield DONE


def _no_usage_yet() -> None:
    """As OpenAI does: every chunk says that usage comes later."""


async def _merged(engine: Engine, prompts: list[Prompt]) -> AsyncGenerator[Delta, None]:
    """Deltas of all choices as they come. The first error ends all of them."""
    queue: asyncio.Queue[Delta | ApiError] = asyncio.Queue(MERGE_QUEUE)

    async def pump(index: int, prompt: Prompt) -> None:
        try:
            async with aclosing(generate(engine, index, prompt)) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
        except ApiError as error:
            await queue.put(error)
        except Exception as error:
            logger.exception("a request failed")
            await queue.put(internal(f"unexpected {type(error).__name__}: see the engine's log"))

    if len(prompts) == 1:
        async with aclosing(generate(engine, 0, prompts[0])) as deltas:
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
