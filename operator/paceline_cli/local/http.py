"""The object store on loopback as a subset of the Kubernetes API: processes use the same client as in a cluster.

Discovery, get, list, watch, create, update, server-side apply, merge patch, delete, and the status subresource, for the
kinds of `paceline_api.kube`; one bearer token, loopback only. Not here: strategic and JSON patches, limit/continue
(lists are always whole), bookmarks, protobuf. Must not import a Kubernetes client.
"""

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline_api.kube import Expired, Invalid, Kind, KubeError, Manifest, WatchEvent
from paceline_cli.local import discovery
from paceline_cli.local.store import ObjectStore

BODY_BYTES_MAX = 4 * 1024 * 1024
WATCHES_MAX = 256
_WATCH_S_MAX = 3600
_VIA = "/via/"
_STOP_S = 2


@dataclass(frozen=True, slots=True)
class Address:
    """What a path names. `name` "" = the collection."""

    kind: Kind
    namespace: str | None
    name: str
    status: bool


class ApiServer:
    """`await start()` listens on `host`:`port` (0 = any free one) in the running loop; `await stop()` ends it."""

    def __init__(self, store: ObjectStore, token: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.url = ""
        self._store = store
        self.token = token
        self._host = host
        self._port = port
        self._watches = 0
        self._stopping = asyncio.Event()
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def kubectl_url(self) -> str:
        """The URL with the token in its path, for kubectl: it sends no credentials over plain HTTP."""
        return f"{self.url}{_VIA}{self.token}"

    async def start(self) -> str:
        """Returns the URL; raises OSError where the port is taken."""
        config = uvicorn.Config(
            self.app(),
            host=self._host,
            port=self._port,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_STOP_S,
        )
        server = self._server = _Server(config)
        listener = _bind(self._host, self._port)
        self.url = f"http://{self._host}:{listener.getsockname()[1]}"
        self._task = asyncio.ensure_future(server.serve(sockets=[listener]))
        ready = asyncio.ensure_future(server.ready.wait())
        await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return self.url

    async def stop(self) -> None:
        """Ends watches and open requests."""
        self._stopping.set()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task

    def app(self) -> Starlette:
        """The ASGI application."""
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return Starlette(routes=[Route("/{path:path}", self._endpoint, methods=methods)])

    async def _endpoint(self, request: Request) -> Response:
        try:
            return await self._answer(request, self._authenticated(request))
        except KubeError as error:
            return _failure(error)

    def _authenticated(self, request: Request) -> str:
        """The path of the API; KubeError 401 without the token in the header or in the path."""
        path = request.url.path
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if path.startswith(_VIA):
            given, _, rest = path.removeprefix(_VIA).partition("/")
            path = f"/{rest}"
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise KubeError(401, "Unauthorized", "Unauthorized")
        return path

    async def _answer(self, request: Request, path: str) -> Response:
        if request.method == "GET" and (document := discovery.document(path)) is not None:
            return JSONResponse(document)
        address = _address(path)
        if request.method == "GET":
            if address.name:
                return JSONResponse(self._existing(address))
            if request.query_params.get("watch") in ("1", "true", "True"):
                return self._watch(address, request)
            return self._list(address, request)
        if request.method == "DELETE":
            return self._delete(address, await _json(request))
        return JSONResponse(
            self._write(request, address, await _json(request)), 201 if request.method == "POST" else 200
        )

    def _existing(self, address: Address) -> Manifest:
        found = self._store.get(address.kind, address.namespace or "", address.name)
        if found is None:
            raise KubeError(404, "NotFound", f'{address.kind.plural} "{address.name}" not found')
        return found

    def _list(self, address: Address, request: Request) -> Response:
        items, version = self._store.list(address.kind, address.namespace, **_selectors(request))
        kind = address.kind
        meta = {"resourceVersion": version}
        return JSONResponse(
            {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": meta, "items": items}
        )

    def _write(self, request: Request, address: Address, body: Any) -> Manifest:
        if not isinstance(body, dict):
            raise Invalid(400, "BadRequest", "the body must be an object")
        body = _addressed(body, address)
        store = self._store
        if request.method == "POST" and not address.name:
            return store.create(body)
        if request.method == "PUT" and address.name:
            return store.replace_status(body) if address.status else store.replace(body)
        if request.method == "PATCH" and address.name:
            content = request.headers.get("content-type", "").partition(";")[0]
            if content in ("application/apply-patch+yaml", "application/apply-patch+cbor"):
                return self._apply(request, address, body)
            if content == "application/merge-patch+json":
                return self._merge_patch(address, body)
            why = f"{content or 'no content type'}: use apply-patch+yaml or merge-patch+json"
            raise KubeError(415, "UnsupportedMediaType", why)
        raise KubeError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _apply(self, request: Request, address: Address, body: Manifest) -> Manifest:
        manager = request.query_params.get("fieldManager", "")
        if not manager:
            raise Invalid(422, "Invalid", "fieldManager: is required for apply patch")
        force = request.query_params.get("force") in ("1", "true", "True")
        if not address.status:
            return self._store.apply(body, field_manager=manager, force=force)
        if not force:
            raise Invalid(422, "Invalid", "force: only forced applies of the status are served here; set force=true")
        return self._store.apply_status(body, field_manager=manager)

    def _merge_patch(self, address: Address, patch: Manifest) -> Manifest:
        """RFC 7386. The version read is a precondition: a writer in between makes a Conflict, not a lost update."""
        old = self._existing(address)
        new = _merged(old, patch)
        return self._store.replace_status(new) if address.status else self._store.replace(new)

    def _delete(self, address: Address, options: Any) -> Response:
        if not address.name:
            raise KubeError(405, "MethodNotAllowed", "deleting collections is not served here")
        options = options if isinstance(options, dict) else {}
        uid = (options.get("preconditions") or {}).get("uid")
        grace = options.get("gracePeriodSeconds")
        store, namespace = self._store, address.namespace or ""
        if not store.delete(address.kind, namespace, address.name, uid=uid, grace_s=grace):
            raise KubeError(404, "NotFound", f'{address.kind.plural} "{address.name}" not found')
        left = store.get(address.kind, namespace, address.name)
        return JSONResponse(left or {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    def _watch(self, address: Address, request: Request) -> Response:
        if self._watches >= WATCHES_MAX:
            raise KubeError(429, "TooManyRequests", f"{WATCHES_MAX} watches are open: close some")
        version = request.query_params.get("resourceVersion", "")
        initial: list[WatchEvent] = []
        if version in ("", "0"):
            # Without a version a watch begins with what is there.
            items, version = self._store.list(address.kind, address.namespace, **_selectors(request))
            initial = [WatchEvent("ADDED", item) for item in items]
        # Asked once before the answer begins, so that a version that is too old is an HTTP 410.
        self._store.events(address.kind, address.namespace, resource_version=version, **_selectors(request))
        timeout_s = min(float(request.query_params.get("timeoutSeconds") or _WATCH_S_MAX), _WATCH_S_MAX)
        lines = self._lines(address, request, version, initial, timeout_s)
        return StreamingResponse(lines, media_type="application/json")

    async def _lines(
        self, address: Address, request: Request, version: str, initial: list[WatchEvent], timeout_s: float
    ) -> AsyncIterator[bytes]:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        deadline = loop.time() + timeout_s
        unsubscribe = self._store.subscribe(_waker(address.kind, loop, wake))
        self._watches += 1
        try:
            for event in initial:
                yield _line(event.type, event.object)
            while not self._stopping.is_set() and loop.time() < deadline:
                wake.clear()
                found, version = self._store.events(
                    address.kind, address.namespace, resource_version=version, **_selectors(request)
                )
                for event in found:
                    yield _line(event.type, event.object)
                await self._pause(wake, deadline - loop.time())
        except Expired as error:
            yield _line("ERROR", _status(error))
        finally:
            self._watches -= 1
            unsubscribe()

    async def _pause(self, wake: asyncio.Event, limit_s: float) -> None:
        waits = [asyncio.ensure_future(wake.wait()), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waits, timeout=max(0.0, limit_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (Ctrl-C belongs to the program around it); `ready` is set once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    # The protocol is named because asyncio sets TCP_NODELAY only on sockets that name it; without it each answer waits
    # some 40 ms for a delayed acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"port {port} is in use on {host}: stop the other program or choose another"
        ) from error
    return listener


def _waker(kind: Kind, loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> Callable[[Kind], None]:
    def written(changed: Kind) -> None:
        if changed == kind:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loop.call_soon_threadsafe(wake.set)

    return written


def _address(path: str) -> Address:
    """`/api/v1/...` or `/apis/GROUP/VERSION/...`, with or without namespaces/NS."""
    words = [word for word in path.split("/") if word]
    group, rest = ("", words[1:]) if words[:1] == ["api"] else ("/".join(words[1:2]), words[2:])
    version, rest = "".join(rest[:1]), rest[1:]
    namespace = None
    if rest[:1] == ["namespaces"] and len(rest) >= 3:
        namespace, rest = rest[1], rest[2:]
    kind = discovery.find(group, version, "".join(rest[:1]))
    status = rest[2:] == ["status"]
    if kind is None or len(rest) > 3 or (len(rest) == 3 and not status) or (len(rest) > 1 and namespace is None):
        raise KubeError(404, "NotFound", "the server could not find the requested resource")
    return Address(kind, namespace, "".join(rest[1:2]), status)


def _addressed(body: Manifest, address: Address) -> Manifest:
    """The body with the type and address of the path; Invalid where it says otherwise."""
    meta = dict(body.get("metadata") or {})
    for key, wanted in (("name", address.name), ("namespace", address.namespace)):
        if wanted and meta.setdefault(key, wanted) != wanted:
            raise Invalid(400, "BadRequest", f"metadata.{key} {meta[key]!r} is not {wanted!r} of the path")
    return {**body, "apiVersion": address.kind.api_version, "kind": address.kind.kind, "metadata": meta}


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


async def _json(request: Request) -> Any:
    """The body; JSON, which is also the YAML that clients send for an apply."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise KubeError(413, "RequestEntityTooLarge", f"the body is larger than {BODY_BYTES_MAX} bytes")
    try:
        return json.loads(body) if body else None
    except ValueError as error:
        raise Invalid(400, "BadRequest", f"the body is not JSON: {error}") from error


def _selectors(request: Request) -> dict[str, str]:
    query = request.query_params
    return {"label_selector": query.get("labelSelector", ""), "field_selector": query.get("fieldSelector", "")}


def _line(kind: str, manifest: Manifest) -> bytes:
    return json.dumps({"type": kind, "object": manifest}, separators=(",", ":")).encode() + b"\n"


def _status(error: KubeError) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": error.message,
        "reason": error.reason,
        "code": error.status,
    }


def _failure(error: KubeError) -> Response:
    return JSONResponse(_status(error), error.status)
