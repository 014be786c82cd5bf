"""The apps of the two private ports: load, KV events, drain, cache reset, sleep and adapters; and metrics."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from paceline_api.wire import DrainRequest, DrainState, EngineLoad
from paceline_engine.core_client import CoreError
from paceline_engine.messages import CommandName, CoreStats
from paceline_engine.server.adapters import add_adapter_routes
from paceline_engine.server.engine import Engine, State
from paceline_engine.server.errors import ApiError, invalid
from paceline_engine.server.routes import add_error_handlers
from paceline_engine.server.transport import EventStream, InternalToken, RequestIds, read_body


def build_admin_app(engine: Engine, token: str | None, drain: Callable[[float], None]) -> FastAPI:
    """The app of the admin port. `drain` stops admission and ends what still runs after that many seconds."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(InternalToken, token=token)
    app.add_middleware(RequestIds)
    add_error_handlers(app)

    @app.get("/v1/load")
    async def load() -> Response:
        return JSONResponse(current_load(engine).model_dump())

    @app.get("/v1/kv-events")
    async def kv_events(request: Request) -> Response:
        start = _whole_number(request, "from")
        serving = engine.serving
        about = {"namespace_digest": serving.ready.namespace_digest, "block_size": serving.ready.block_size}
        lines = engine.events.lines(request.query_params.get("epoch"), start, about)
        await read_body(request)
        return EventStream(lines, "application/x-ndjson")

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return await _command(engine, "reset_prefix_cache")

    @app.post("/sleep")
    async def sleep(request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise invalid(f"query parameter level: {level[:40]!r} is neither 1 nor 2", "level")
        return await _command(engine, "sleep", level=level)

    @app.post("/wake_up")
    async def wake_up() -> Response:
        return await _command(engine, "wake")

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return JSONResponse({"is_sleeping": engine.asleep})

    add_adapter_routes(app, engine)

    @app.get("/admin/explain")
    async def explain() -> Response:
        return JSONResponse(await _ask(engine, "explain"))

    @app.get("/admin/step-log")
    async def step_log() -> Response:
        return Response((await _ask(engine, "explain", log="true"))["log"], media_type="application/msgpack")

    @app.post("/admin/drain")
    async def start_drain(request: Request) -> Response:
        body = await read_body(request)
        try:
            asked = DrainRequest.model_validate_json(body or b"{}")
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"])) or None
            raise invalid(f"{field or 'the body'}: {problem['msg']}", field, "invalid_value") from error
        if not 0 <= asked.deadline_s < math.inf:
            raise invalid("deadline_s must be a number of seconds, not negative", "deadline_s")
        drain(asked.deadline_s)
        return JSONResponse(DrainState(draining=True, in_flight=engine.in_flight).model_dump())

    return app


async def _command(engine: Engine, name: CommandName, **arguments: str) -> Response:
    return JSONResponse(await _ask(engine, name, **arguments))


async def _ask(engine: Engine, name: CommandName, **arguments: str) -> dict[str, Any]:
    """Have the core do it. Raises ApiError: 409 with the core's reason if it can't be done now."""
    try:
        return await engine.serving.core.command(name, **arguments)
    except CoreError as error:
        raise ApiError(409, str(error), kind="conflict", code="refused_by_core") from error


def _whole_number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise invalid(f"query parameter {name}: {text[:40]!r} is not a whole number", name)
    return int(text)


def current_load(engine: Engine) -> EngineLoad:
    """What is true now; zeros while the model loads."""
    core = engine.core
    stats = core.stats if core is not None else CoreStats()
    ready = engine.serving.ready if core is not None else None
    return EngineLoad(
        time=engine.wall_clock(),
        running=stats.num_running,
        waiting=stats.num_waiting,
        in_flight=engine.in_flight,
        num_blocks=ready.num_blocks if ready else 0,
        free_blocks=stats.num_free_blocks,
        block_size=ready.block_size if ready else 0,
        namespace_digest=ready.namespace_digest if ready else "",
        draining=engine.state is State.DRAINING,
        asleep=stats.asleep,
        cached_blocks=stats.num_cached_blocks,
        max_model_len=ready.max_model_len if ready else 0,
        tokenizer_digest=engine.serving.model.tokenizer_digest if core is not None else "",
        step_alpha_s=stats.step_alpha_seconds,
        step_beta_s=stats.step_beta_seconds,
        prefill_tokens_per_s=stats.prefill_tokens_per_second,
        epoch=engine.events.epoch,
        config_hash=engine.config_hash,
        kv_flush=engine.kv_flush,
    )


def build_metrics_app(registry: CollectorRegistry, refresh: Callable[[], Awaitable[None]]) -> FastAPI:
    """The app of the metrics port. `refresh` is awaited before each scrape."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)

    @app.get("/metrics")
    async def metrics() -> Response:
        await refresh()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
