"""One client of the node server, from its first frame to its last: one thread, one request at a time.

Whatever a client does wrong ends its own connection, with a reason, and nothing else. Payloads go out from the tier's
memory and come in straight into the buffer that the tier copies from.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from paceline_kvstore import codec
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.quarantine import Quarantine
from paceline_kvstore.server.buffers import BufferPool
from paceline_kvstore.server.drain import DrainFlag
from paceline_kvstore.server.limits import Limits
from paceline_kvstore.server.metrics import ServerMetrics
from paceline_kvstore.server.store import NodeStore
from paceline_kvstore.tiers.base import Lease
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire import transport
from paceline_kvstore.wire.chunks import receive_chunk
from paceline_kvstore.wire.frames import HELLO_BYTES_MAX, Head, ProtocolError
from paceline_kvstore.wire.messages import Reason
from paceline_kvstore.wire.tls import ServerTls, TlsStream

logger = logging.getLogger(__name__)

_LINGER_S = 0.5
_LINGER_BYTES = 4 << 20
_SCRATCH_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Shared:
    """What all connections of a server use."""

    store: NodeStore
    limits: Limits
    token: str | None
    buffers: BufferPool
    quarantine: Quarantine
    metrics: ServerMetrics
    drain: DrainFlag


class _Refused(Exception):
    """The connection ends with this reason."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Connection:
    """Serves one socket in `run`; `stop` ends it from another thread."""

    def __init__(self, sock: socket.socket, shared: Shared, tls: ServerTls | None = None) -> None:
        self._sock = sock
        self._tls = tls
        self._stream: transport.Stream = transport.PlainStream(sock)
        self._inbox = transport.Inbox(self._stream)
        self._shared = shared
        self._listing: Iterator[ChunkKey] = iter(())

    def run(self) -> None:
        """Until the client leaves, breaks a rule, or the server drains. Raises nothing; the socket is closed."""
        reason, message = None, "closed"
        try:
            self._serve()
        except transport.Gone:
            pass
        except _Refused as refusal:
            reason, message = refusal.reason, str(refusal)
        except ProtocolError as error:
            reason, message = Reason.BAD_FRAME, str(error)
        except transport.Slow as error:
            reason, message = Reason.SLOW, f"{error}: the limit is {self._shared.limits.frame_timeout_s:g} s a frame"
        except OSError as error:
            message = f"lost: {error}"
        except Exception:
            logger.exception("a connection failed")
            reason, message = Reason.INTERNAL, "the server failed; its log says why"
        finally:
            self._end(reason, message)

    def stop(self) -> None:
        """End it now, whatever it does."""
        self._stream.stop()

    def _serve(self) -> None:
        limits, drain = self._shared.limits, self._shared.drain
        deadline = time.monotonic() + limits.hello_timeout_s
        transport.tune(self._sock)
        if self._tls is not None:
            self._stream = stream = TlsStream(self._tls.accept(self._sock))
            self._inbox = transport.Inbox(stream)
            stream.shake_hands(deadline)
        self._welcome(deadline)
        waiter = drain.poll(self._stream.fileno())
        while True:
            # What a client sent before the drain began is still answered.
            if not self._inbox.has_bytes and not waiter.readable(0 if drain.is_set else limits.idle_timeout_s):
                if not drain.is_set:
                    raise transport.Gone("idle")
                if not self._inbox.has_bytes and not waiter.readable(0):
                    raise _Refused(Reason.DRAINING, "the server is draining: use another, or none")
            self._serve_one()

    def _welcome(self, deadline: float) -> None:
        """The first frame, which must be a Hello with the right token."""
        shared = self._shared
        head = self._inbox.head(HELLO_BYTES_MAX, 0, deadline)
        hello = msg.decode_request(head.kind, self._inbox.read(head.field_bytes, deadline))
        if not isinstance(hello, msg.Hello):
            raise ProtocolError("the first frame must be a hello")
        if shared.token is not None and not hmac.compare_digest(hello.token.encode(), shared.token.encode()):
            what = "wrong" if hello.token else "missing"
            raise _Refused(Reason.UNAUTHORIZED, f"the token is {what}: give the client the server's --token-file")
        welcome = msg.Welcome(shared.store.tier.capacity, shared.limits.payload_bytes)
        self._stream.send([msg.encode_reply(head.request_id, welcome)], deadline)

    def _serve_one(self) -> None:
        shared = self._shared
        begun = time.monotonic()
        deadline = begun + shared.limits.frame_timeout_s
        head = self._inbox.head(msg.MESSAGE_FIELD_BYTES_MAX, shared.limits.payload_bytes, deadline)
        request = msg.decode_request(head.kind, self._inbox.read(head.field_bytes, deadline))
        if isinstance(request, msg.Hello):
            raise ProtocolError("a second hello")
        if head.payload_bytes and not isinstance(request, msg.Put):
            raise ProtocolError(f"request {msg.op_of(request).name.lower()} has no payload, this one has one")
        outcome = "lost"
        try:
            outcome = self._answer(head, request, deadline)
        finally:
            shared.metrics.on_request(msg.op_of(request), outcome, time.monotonic() - begun)

    def _answer(self, head: Head, request: msg.Request, deadline: float) -> str:
        """Do it and reply; the outcome's label."""
        match request:
            case msg.Get():
                return self._send_chunk(head.request_id, request)
            case msg.Put():
                kept = self._receive_chunk(head, request, deadline)
                self._reply(head.request_id, msg.Count(kept))
                return "ok" if kept else "refused"
            case _:
                self._reply(head.request_id, self._do(request))
                return "ok"

    def _do(self, request: msg.Request) -> msg.Reply:
        """Requests without a payload either way."""
        store = self._shared.store
        tier = store.tier
        match request:
            case msg.Contains(keys, milliseconds):
                return msg.Count(tier.contains(keys, deadline=milliseconds / 1000))
            case msg.Delete(key):
                return msg.Count(tier.delete(key))
            case msg.Clear(namespace, tenant):
                return msg.Count(tier.clear(namespace=namespace, tenant=tenant))
            case msg.Keys(restart):
                return self._key_page(restart)
            case msg.Stats():
                return msg.StatsReply(tier.stats, tier.bytes_used, tier.capacity, store.pinned.count)
            case msg.Flush():
                return msg.Count(tier.flush())
            case msg.Pin(holder, keys, milliseconds):
                return msg.Count(store.pin(holder, keys, max(1, milliseconds) / 1000))
            case msg.Unpin(holder):
                return msg.Count(store.unpin(holder))
            case msg.Extend(holder, milliseconds):
                return msg.Count(store.extend(holder, max(1, milliseconds) / 1000))
            case _:
                raise ProtocolError(f"{type(request).__name__} isn't answered without a payload")

    def _key_page(self, restart: bool) -> msg.KeyPage:
        if restart:
            self._listing = self._shared.store.tier.keys()
        keys = tuple(islice(self._listing, msg.KEYS_MAX))
        return msg.KeyPage(keys, more=len(keys) == msg.KEYS_MAX)

    def _reply(self, request_id: int, reply: msg.Reply) -> None:
        self._stream.send([msg.encode_reply(request_id, reply)], self._reply_deadline())

    def _send_chunk(self, request_id: int, request: msg.Get) -> str:
        tier, seconds = self._shared.store.tier, request.milliseconds / 1000
        if request.tenant is None:
            lease = tier.lease(request.key, deadline=seconds)
        else:
            lease = tier.lease_of(request.key, (request.parent, request.tenant), deadline=seconds)
        if lease is None:
            self._reply(request_id, msg.Miss())
            return "miss"
        try:
            return self._send_lease(request_id, request, lease)
        finally:
            lease.release()

    def _send_lease(self, request_id: int, request: msg.Get, lease: Lease) -> str:
        size = len(lease.payload)
        if size > request.capacity:
            self._reply(request_id, msg.TooLarge(size))
            return "too_large"
        frame = msg.encode_reply(request_id, msg.Hit(), codec.encoded_size(size))
        header = codec.encode_header(request.key, lease.payload) if lease.header is None else lease.header
        self._stream.send([frame, codec.as_bytes(lease.payload), header], self._reply_deadline())
        self._shared.metrics.on_sent(size)
        return "ok"

    def _receive_chunk(self, head: Head, request: msg.Put, deadline: float) -> bool:
        """Whether the chunk in the frame's payload is kept."""
        shared = self._shared
        size = head.payload_bytes - codec.HEADER_BYTES
        if size < 0:
            raise ProtocolError(f"request put has {head.payload_bytes} bytes of payload, too few for a chunk's header")
        with shared.buffers.room(size, shared.limits.inflight_wait_s) as granted:
            if granted:
                kept = self._receive_payload(request, size, deadline)
                shared.metrics.on_received(size)
                return kept
        self._skip(head.payload_bytes, deadline)
        return False

    def _receive_payload(self, request: msg.Put, size: int, deadline: float) -> bool:
        """Into the tier's own memory where it has some for it, else into a buffer that the tier copies from."""
        tier, key = self._shared.store.tier, request.key
        filling = None if request.durable else tier.fill(key, size, parent=request.parent, tenant=request.tenant)
        buffer = self._shared.buffers.take(size) if filling is None else filling.buffer
        if buffer is None:
            self._skip(codec.encoded_size(size), deadline)
            return False
        try:
            header = receive_chunk(self._inbox, key, buffer, deadline)
        except KVStoreError as error:
            self._shared.quarantine.add(key, "received", error)
            return False
        if filling is not None:
            return filling.keep(header)
        return tier.put(key, buffer, parent=request.parent, tenant=request.tenant, durable=request.durable)

    def _skip(self, num_bytes: int, deadline: float) -> None:
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while num_bytes:
            part = scratch[: min(num_bytes, _SCRATCH_BYTES)]
            self._inbox.read_into(part, deadline)
            num_bytes -= len(part)

    def _reply_deadline(self) -> float:
        return time.monotonic() + self._shared.limits.frame_timeout_s

    def _end(self, reason: Reason | None, message: str) -> None:
        self._shared.metrics.on_closed(reason)
        if reason is not None:
            _say_why(self._stream, reason, message)
        self._stream.close()
        logger.log(logging.DEBUG if reason in (None, Reason.DRAINING) else logging.WARNING, "connection: %s", message)


def _say_why(stream: transport.Stream, reason: Reason, message: str) -> None:
    """Send FAIL and let the client read it: bytes that nobody reads would make the kernel reset the connection."""
    deadline = time.monotonic() + _LINGER_S
    with contextlib.suppress(OSError):
        stream.send([msg.encode_reply(0, msg.Fail(reason, message))], deadline)
        stream.end()
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        for _ in range(_LINGER_BYTES // _SCRATCH_BYTES):
            if not stream.receive(scratch, deadline, whole=True):
                return
