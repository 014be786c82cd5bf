"""/tokenize and /detokenize in vLLM's shapes, and endpoints that are refused by name."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from paceline_engine.server.chat_schemas import TemplateFields
from paceline_engine.server.engine import Engine
from paceline_engine.server.errors import ApiError, invalid
from paceline_engine.server.parsing import parsed
from paceline_engine.server.prompts import encode, render
from paceline_engine.server.sampling import checked_ids
from paceline_engine.server.schemas import StrictModel, TokenId
from paceline_engine.server.transport import read_body

MAX_DETOKENIZE = 1_000_000
_NOT_SERVED = ("/v1/responses", "/v1/score", "/v1/rerank", "/v1/messages")


class TokenizeText(StrictModel):
    """A plain prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(TemplateFields):
    """Messages, as a chat request has them."""

    model: str | None = None
    return_token_strs: bool = False


class Detokenize(StrictModel):
    """Token ids."""

    tokens: list[TokenId] = Field(max_length=MAX_DETOKENIZE)
    model: str | None = None


def add_text_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to the public app."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        if _has_messages(await read_body(request)):
            chat = await parsed(engine, request, TokenizeChat)
            text = render(engine.serving, chat, chat.tools)
            return await _tokens(engine, text, "messages", chat.add_special_tokens, chat.return_token_strs)
        body = await parsed(engine, request, TokenizeText)
        return await _tokens(engine, body.prompt, "prompt", body.add_special_tokens, body.return_token_strs)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await parsed(engine, request, Detokenize)
        checked_ids(engine.serving, body.tokens, "tokens")
        return JSONResponse({"prompt": engine.serving.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    for path in _NOT_SERVED:
        _refuse(app, path)


def _has_messages(body: bytes) -> bool:
    try:
        raw: Any = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("messages") is not None


async def _tokens(engine: Engine, text: str, param: str, add_special_tokens: bool, with_strings: bool) -> Response:
    serving = engine.serving
    ids = await encode(serving, text, param, add_special_tokens=add_special_tokens)
    strings = [serving.tokenizer.token_text(token_id) for token_id in ids] if with_strings else None
    limit = serving.ready.max_model_len
    return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


def _refuse(app: FastAPI, path: str) -> None:
    @app.post(path)
    async def refuse(_request: Request) -> Response:
        error: ApiError = invalid(
            f"{path} is not served by this engine: use /v1/chat/completions, /v1/completions or /v1/embeddings",
            code="unsupported_endpoint",
        )
        raise error
