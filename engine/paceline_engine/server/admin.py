"""The apps of the two private ports: load and drain for the control plane, metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from paceline_api.wire import DrainRequest, DrainState, EngineLoad
from paceline_engine.messages import CoreStats
from paceline_engine.server.engine import Engine, State
from paceline_engine.server.errors import invalid
from paceline_engine.server.routes import add_error_handlers
from paceline_engine.server.transport import InternalToken, RequestIds, read_body


def build_admin_app(engine: Engine, token: str | None, drain: Callable[[float], None]) -> FastAPI:
    """The app of the admin port. `drain` stops admission and ends what still runs after that many seconds."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(InternalToken, token=token)
    app.add_middleware(RequestIds)
    add_error_handlers(app)

    @app.get("/v1/load")
    async def load() -> Response:
        return JSONResponse(current_load(engine).model_dump())

    @app.post("/admin/drain")
    async def start_drain(request: Request) -> Response:
        body = await read_body(request)
        try:
            asked = DrainRequest.model_validate_json(body or b"{}")
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise invalid(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", code="invalid_value") from error
        if asked.deadline_s < 0:
            raise invalid("deadline_s must not be negative: give seconds", "deadline_s")
        drain(asked.deadline_s)
        return JSONResponse(DrainState(draining=True, in_flight=engine.in_flight).model_dump())

    return app


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
    )


def build_metrics_app(registry: CollectorRegistry) -> FastAPI:
    """The app of the metrics port."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
