"""From an HTTP request to a checked body of its kind, counted if it is refused."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from paceline_engine.server.engine import Engine
from paceline_engine.server.errors import ApiError
from paceline_engine.server.schemas import parse
from paceline_engine.server.transport import read_body

R = TypeVar("R", bound=BaseModel)


async def parsed(engine: Engine, request: Request, kind: type[R]) -> R:
    """The body. Raises ApiError: 503 before it is read if nothing is served, then 400, 404 and 413."""
    engine.refuse_unless_ready()
    try:
        body = parse(kind, await read_body(request))
        model = getattr(body, "model", None)
        if model is not None and model != engine.model_name and model not in engine.adapters:
            message = f"model {model!r} is not served here: use {engine.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
    except ApiError:
        engine.metrics.on_rejected("invalid")
        raise
    return body
