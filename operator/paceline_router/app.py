"""What the router serves: the public port (completions, embeddings, models, health), admin and metrics port.

Completion and embedding requests go to the proxy as raw ASGI; FastAPI answers everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException

from paceline_router import headers as header_rules
from paceline_router.asgi import Receive, Scope, Send
from paceline_router.errors import ApiError, MethodNotAllowed, NotFound
from paceline_router.inflight import InFlight
from paceline_router.ledger import Ledger
from paceline_router.proxy import PATHS, Proxy, find_model
from paceline_router.records import Endpoint
from paceline_router.snapshot import Model, Snapshot
from paceline_router.token_file import TokenFile

Check = Callable[[], bool]


class Gateway:
    """The ASGI application of the public port."""

    def __init__(self, proxy: Proxy, rest: FastAPI) -> None:
        self._proxy = proxy
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS:
            await self._proxy(scope, receive, send)
        else:
            await self._rest(scope, receive, send)


def public_app(proxy: Proxy, snapshot: Callable[[], Snapshot], *, live: Check, ready: Check) -> Gateway:
    app = _bare_app()

    def allowed(request: Request) -> dict[str, Model]:
        view = snapshot()
        tenant = proxy.authenticate(view, header_rules.decoded(request.headers.raw), request.scope)
        return {model.service.served_name: model for model in view.models_of(tenant)}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(model) for model in allowed(request).values()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        view = snapshot()
        tenant = proxy.authenticate(view, header_rules.decoded(request.headers.raw), request.scope)
        return _model_object(find_model(view, tenant, name))

    @app.get("/health/live")
    async def health_live() -> Response:
        return _health(live(), "a watch thread has died; restart the router")

    @app.get("/health/ready")
    async def health_ready() -> Response:
        return _health(ready(), "the first lists are not complete, or the router is stopping")

    return Gateway(proxy, app)


def admin_app(
    snapshot: Callable[[], Snapshot], in_flight: InFlight, ledger: Ledger, token: TokenFile | None
) -> FastAPI:
    """Everything here needs the internal token; without a token file everything is refused."""
    app = _bare_app()

    def check(request: Request) -> None:
        if token is None:
            raise _Forbidden("start the router with --internal-token-file to use its admin port")
        if not token.matches(request.headers.get("authorization")):
            raise _Forbidden("send the internal token as 'Authorization: Bearer TOKEN'")

    @app.get("/admin/endpoints")
    async def endpoints(request: Request) -> dict[str, Any]:
        check(request)
        return {"v": 1, "endpoints": _endpoint_rows(snapshot(), in_flight)}

    @app.get("/slo")
    async def slo(request: Request) -> dict[str, Any]:
        check(request)
        return ledger.summary()

    return app


def metrics_app(registry: CollectorRegistry, sample: Callable[[], None]) -> FastAPI:
    """`sample` sets the gauges right before they are read."""
    app = _bare_app()

    @app.get("/metrics")
    async def scrape(request: Request) -> Response:
        sample()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return app


class _Forbidden(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "forbidden"


def _bare_app() -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body(), error.status, headers, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405 or request.url.path in PATHS:
        return await _api_error(request, MethodNotAllowed(f"{where}: this path takes another method"))
    return await _api_error(request, NotFound(f"{where}: there is no such path here"))


def _health(good: bool, reason: str) -> Response:
    return JSONResponse({"status": "ok"} if good else {"status": "unavailable", "reason": reason}, 200 if good else 503)


def _model_object(model: Model) -> dict[str, Any]:
    service = model.service
    return {"id": service.served_name, "object": "model", "created": service.created, "owned_by": "paceline"}


def _endpoint_rows(snapshot: Snapshot, in_flight: InFlight) -> list[dict[str, Any]]:
    """One row for each known endpoint, and one for each that has requests though discovery lost sight of it."""
    rows: list[dict[str, Any]] = []
    known: set[object] = set()
    for name, model in sorted(snapshot.models.items()):
        for endpoint in model.endpoints:
            known.add(endpoint.id)
            rows.append(_endpoint_row(endpoint, in_flight, name, model.service.name))
    for key in sorted(key for key in in_flight.counts if key not in known):
        gone = Endpoint(key, ready=False, terminating=True)
        rows.append(_endpoint_row(gone, in_flight, None, None))
    return rows


def _endpoint_row(endpoint: Endpoint, in_flight: InFlight, model: str | None, service: str | None) -> dict[str, Any]:
    return {
        "model": model,
        "service": service,
        "pod": endpoint.id.pod,
        "address": endpoint.id.address,
        "port": endpoint.id.port,
        "ready": endpoint.ready,
        "draining": endpoint.terminating,
        "runtime": endpoint.runtime,
        "in_flight": in_flight.at(endpoint.id),
    }
