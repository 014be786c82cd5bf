"""One authenticated connection to a node server, for one caller at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire import transport
from paceline_kvstore.wire.address import Address
from paceline_kvstore.wire.frames import Head, ProtocolError


class Refused(KVStoreError):
    """The server says why it does not do it. `reason` is the protocol's."""

    def __init__(self, fail: msg.Fail) -> None:
        super().__init__(fail.message)
        self.reason = fail.reason


class Link:
    """Deadlines are on `time.monotonic`, in seconds. After any error it can't be used again."""

    def __init__(self, address: Address, hello: msg.Hello, deadline: float) -> None:
        """Connect and say hello. Raises OSError (Slow at the deadline), Refused or ProtocolError."""
        timeout = deadline - time.monotonic()
        if timeout <= 0:
            raise transport.Slow("the deadline has passed")
        self._sock = address.connect(timeout)
        self._inbox = transport.Inbox(self._sock)
        self._last_id = self._answered_id = 0
        self.chunk_bytes_max = 2**63
        self.used = False
        try:
            welcome, _ = self.ask(hello, deadline)
            if not isinstance(welcome, msg.Welcome):
                raise ProtocolError(f"the server answers a hello with {type(welcome).__name__}")
        except BaseException:
            self.close()
            raise
        self.chunk_bytes_max = welcome.payload_bytes_max
        self.capacity = welcome.capacity

    def ask(self, request: msg.Request, deadline: float, payload: Sequence[Buffer] = ()) -> tuple[msg.Reply, Head]:
        """Send a request and read its reply's fields; a hit's payload is still to be received.

        Raises OSError, Refused or ProtocolError.
        """
        try:
            self.post(request, deadline, payload)
        except (BrokenPipeError, ConnectionResetError):
            # The server may have said why before it closed.
            return self.collect(deadline)
        return self.collect(deadline)

    def post(self, request: msg.Request, deadline: float, payload: Sequence[Buffer] = ()) -> None:
        """Send a request, also before earlier ones were answered. Raises OSError."""
        self._last_id += 1
        size = sum(memoryview(part).nbytes for part in payload)
        transport.send(self._sock, [msg.encode_request(self._last_id, request, size), *payload], deadline)

    def collect(self, deadline: float) -> tuple[msg.Reply, Head]:
        """The fields of the next reply, in the order of the requests. Raises as `ask`."""
        head = self._inbox.head(msg.MESSAGE_FIELD_BYTES_MAX, self.chunk_bytes_max, deadline)
        reply = msg.decode_reply(head.kind, self._inbox.read(head.field_bytes, deadline))
        if isinstance(reply, msg.Fail):
            raise Refused(reply)
        self._answered_id += 1
        if head.request_id != self._answered_id:
            raise ProtocolError(f"the reply is for request {head.request_id}, due is {self._answered_id}")
        return reply, head

    def receive(self, target: bytearray | memoryview, deadline: float) -> None:
        """The next bytes of the last reply's payload, straight into `target`. Raises OSError."""
        self._inbox.read_into(target, deadline)

    def close(self) -> None:
        """Give the connection up. Idempotent."""
        transport.close(self._sock)
