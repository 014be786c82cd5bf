"""A real router on real sockets, small real upstreams, and the local object store as the cluster.

Everything runs in this process on threads of its own, so that tests are plain synchronous clients.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from paceline_api import names
from paceline_api.kube import ENDPOINT_SLICE, INFERENCE_SERVICE, ROUTER, SECRET, TENANT, Kind
from paceline_cli.local.store import ObjectStore
from paceline_router.serve import Listeners, RouterConfig, RouterProcess, listen
from paceline_router.settings import Limits
from paceline_router.token_file import TokenFile

NAMESPACE = "team"
DEADLINE_S = 30.0
TOKEN = "internal-token"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`; fails the test after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
    return value


class Cluster:
    """Writes the objects that a router reads. `store` is the KubeClient."""

    def __init__(self) -> None:
        ids = itertools.count()
        self.store = ObjectStore(
            now=lambda: "2026-01-01T00:00:00Z", new_uid=lambda: f"uid-{next(ids)}", monotonic=time.monotonic
        )

    def apply(self, kind: Kind, name: str, labels: dict[str, str] | None = None, **rest: Any) -> None:
        metadata = {"name": name, "namespace": NAMESPACE, **({"labels": labels} if labels else {})}
        manifest = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **rest}
        self.store.apply(manifest, field_manager="test")

    def delete(self, kind: Kind, name: str) -> None:
        assert self.store.delete(kind, NAMESPACE, name)

    def service(self, name: str = "chat", served_name: str | None = None, **spec: Any) -> None:
        model = {"source": "package://x/y.gguf"} | ({"servedName": served_name} if served_name else {})
        self.apply(INFERENCE_SERVICE, name, spec={"model": model, **spec})

    def router(self, **spec: Any) -> None:
        self.apply(ROUTER, "default", spec=spec)

    def tenant(self, name: str, key: str | None = None, **spec: Any) -> None:
        """A tenant and, with `key`, the Secret that holds it."""
        if key is not None:
            self.secret(f"{name}-key", apiKey=key)
            spec["apiKeySecretRefs"] = [{"name": f"{name}-key"}]
        self.apply(TENANT, name, spec=spec)

    def secret(self, name: str, **values: str) -> None:
        self.apply(SECRET, name, data={key: base64.b64encode(text.encode()).decode() for key, text in values.items()})

    def endpoints(self, service: str, *replicas: Replica) -> None:
        """One EndpointSlice a replica, as each may listen on its own port on a laptop."""
        stale = {
            item["metadata"]["name"] for item in self.store.list(ENDPOINT_SLICE, NAMESPACE).items
            if item["metadata"]["labels"][names.LABEL_SLICE_SERVICE] == names.engine_name(service)
        }  # fmt: skip
        for replica in replicas:
            slice_name = f"{service}-{replica.pod}"
            stale.discard(slice_name)
            self.apply(
                ENDPOINT_SLICE,
                slice_name,
                labels={
                    names.LABEL_SLICE_SERVICE: names.engine_name(service),
                    **({names.LABEL_RUNTIME: replica.runtime} if replica.runtime else {}),
                },
                addressType="IPv4",
                ports=[{"name": "http", "port": replica.port}, {"name": "admin", "port": 1}],
                endpoints=[
                    {
                        "addresses": ["127.0.0.1"],
                        "conditions": {"ready": replica.ready, "terminating": replica.terminating},
                        "targetRef": {"kind": "Pod", "name": replica.pod},
                    }
                ],
            )
        for slice_name in stale:
            self.delete(ENDPOINT_SLICE, slice_name)


@dataclass(frozen=True)
class Replica:
    pod: str
    port: int
    ready: bool = True
    terminating: bool = False
    runtime: str = ""


class LoopThread:
    """An event loop on a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Awaitable[Any], timeout_s: float = DEADLINE_S) -> Any:
        async def wrapped() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(timeout_s)

    def start(self, work: Awaitable[Any]) -> Any:
        async def wrapped() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self.loop.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def word(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


@dataclass
class Seen:
    """One request as an engine got it."""

    path: str
    headers: dict[str, str]
    body: bytes
    closed_s: float | None = None


@dataclass
class FakeEngine:
    """An upstream whose behaviour is set by the test. It serves over a real socket.

    mode: stream, held (streams one word, then waits for `release`), endless, whole, dies, truncated, busy, error,
    refused, encoded, embedding, silent (no headers until `release`).
    """

    mode: str = "stream"
    words: tuple[str, ...] = ("Paris", " is", " it")
    delay_s: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    active: int = 0
    port: int = 0
    taken: bool = False
    metrics: str | None = None

    def start(self, thread: LoopThread) -> FakeEngine:
        self._thread = thread
        self._release = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = _Server(config)
        self._done = thread.start(self._server.serve(sockets=[listener]))
        wait_until(lambda: self._server.started, "engine serves")
        return self

    @property
    def serving(self) -> bool:
        return not self._done.done()

    def reset(self) -> None:
        """Back to how a fresh engine behaves, once no request is left."""
        self.release()
        wait_until(lambda: not self.active, "the engine's requests have ended")
        self.mode, self.delay_s, self.seen, self.taken, self.metrics = "stream", 0.0, [], False, None
        self._thread.run(self._hold())

    async def _hold(self) -> None:
        self._release.clear()

    def ask_to_stop(self) -> None:
        self.release()
        self._server.should_exit = True

    def wait_stopped(self) -> None:
        self._done.result(DEADLINE_S)

    def release(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._release.set)

    def replica(self, pod: str = "engine-0", **fields: Any) -> Replica:
        return Replica(pod, self.port, **fields)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await self._start(send, 200 if self.metrics is not None else 404, b"text/plain")
            await self._part(send, (self.metrics or "").encode(), more=False)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        seen = Seen(scope["path"], headers, body)
        self.seen.append(seen)
        self.active += 1
        work = asyncio.create_task(getattr(self, f"_{self.mode}")(send))
        gone = asyncio.create_task(self._watch(receive, seen))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self.active -= 1
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _watch(self, receive: Any, seen: Seen) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        seen.closed_s = time.monotonic()

    async def _start(self, send: Any, status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [(b"content-type", content_type), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _part(self, send: Any, body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _stream(self, send: Any) -> None:
        extra = ((b"x-paceline-load", b"secret"), (b"connection", b"x-hop"), (b"x-hop", b"1"), (b"x-kept", b"yes"))
        await self._start(send, 200, b"text/event-stream; charset=utf-8", *extra)
        await self._part(send, event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
        for text in self.words:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._part(send, word(text))
        await self._part(send, event(choices=[], usage={"completion_tokens": len(self.words)}))
        await self._part(send, b"data: [DONE]\n\n", more=False)

    async def _held(self, send: Any) -> None:
        await self._start(send, 200, b"text/event-stream")
        await self._part(send, word("one"))
        await self._release.wait()
        await self._part(send, word(" two"))
        await self._part(send, b"data: [DONE]\n\n", more=False)

    async def _endless(self, send: Any) -> None:
        await self._start(send, 200, b"text/event-stream")
        while True:
            await self._part(send, word("x" * 60_000))
            await asyncio.sleep(0)  # sending to a closed connection returns at once

    async def _silent(self, send: Any) -> None:
        await self._release.wait()
        await self._stream(send)

    async def _dies(self, send: Any) -> None:
        await self._start(send, 200, b"text/event-stream")
        await self._part(send, word("one") + b'data: {"cho')
        raise ConnectionAbortedError("the engine dies on purpose")

    async def _truncated(self, send: Any) -> None:
        await self._start(send, 200, b"text/event-stream")
        await self._part(send, word("one"), more=False)

    async def _json(self, send: Any, status: int, document: Any, *headers: tuple[bytes, bytes]) -> None:
        body = json.dumps(document).encode()
        await self._start(send, status, b"application/json", (b"content-length", str(len(body)).encode()), *headers)
        await self._part(send, body, more=False)

    async def _whole(self, send: Any) -> None:
        message = {"role": "assistant", "content": "".join(self.words)}
        usage = {"prompt_tokens": 1, "completion_tokens": len(self.words), "total_tokens": 1 + len(self.words)}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        await self._json(send, 200, {"id": "x", "object": "chat.completion", "choices": choices, "usage": usage})

    async def _embedding(self, send: Any) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": base64.b64encode(b"\0\0\x80?" * 2).decode()}]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        await self._json(send, 200, {"object": "list", "model": "chat", "data": data, "usage": usage})

    async def _encoded(self, send: Any) -> None:
        await self._start(send, 200, b"application/json", (b"content-encoding", b"gzip"))
        await self._part(send, GZIPPED, more=False)

    async def _busy(self, send: Any) -> None:
        await self._json(send, 503, {"error": {"message": "draining"}})

    async def _error(self, send: Any) -> None:
        await self._json(send, 400, {"error": {"message": "max_tokens is too large", "code": "too_large"}})

    async def _refused(self, send: Any) -> None:
        await self._json(send, 401, {"error": {"message": "no"}})


GZIPPED = base64.b64decode("H4sIAAAAAAAC/6uuBQBDv6ajAgAAAA==")


class RunningRouter:
    """A router process on a thread. `url` is its public base URL."""

    def __init__(self, cluster: Cluster, token: TokenFile | None, **limits: Any) -> None:
        config = RouterConfig(
            namespace=NAMESPACE, port=0, admin_port=0, metrics_port=0, limits=Limits(**{"drain_timeout_s": 5, **limits})
        )
        self.listeners: Listeners = listen(config)
        self.process = RouterProcess(config, cluster.store, token)
        self.url, self.admin_url, self.metrics_url = (
            f"http://127.0.0.1:{listener.getsockname()[1]}"
            for listener in (self.listeners.http, self.listeners.admin, self.listeners.metrics)
        )
        self._thread = LoopThread()
        self._run = self._thread.start(self.process.run(self.listeners))
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)
        wait_until(lambda: self.client.get("/health/ready").status_code == 200, "router is ready")

    def ask_to_stop(self) -> None:
        self._thread.loop.call_soon_threadsafe(self.process.stop)

    def wait_stopped(self) -> None:
        self._run.result(DEADLINE_S)

    def stop(self) -> None:
        self.client.close()
        self.ask_to_stop()
        self.wait_stopped()
        self._thread.close()
        self.listeners.close()

    @property
    def in_flight(self) -> int:
        self.process.proxy.in_flight.check_integrity()
        return self.process.proxy.in_flight.total

    def ask(
        self, key: str | None = "sk-alice", stream: bool = True, model: str = "chat", **body: Any
    ) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        document = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "hi"}], **body}
        return self.client.post("/v1/chat/completions", json=document, headers=headers)

    def streaming(self, key: str = "sk-alice", model: str = "chat") -> Any:
        """A context manager whose response is read by the test."""
        return self.client.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": model, "stream": True, "messages": []},
            headers={"authorization": f"Bearer {key}"},
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.process._registry.get_sample_value(name, labels) or 0.0

    def admin(self, path: str, token: str | None = TOKEN) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.get(self.admin_url + path, headers=headers)
