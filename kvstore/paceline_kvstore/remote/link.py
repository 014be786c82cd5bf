"""One authenticated connection to a node server, for one caller at a time."""

from __future__ import annotations

import time

from paceline_kvstore.codec import HEADER_BYTES, Checksum
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire import transport
from paceline_kvstore.wire.address import Address
from paceline_kvstore.wire.chunks import receive_chunk
from paceline_kvstore.wire.frames import Head, ProtocolError
from paceline_kvstore.wire.tls import ClientTls, TlsStream


class Refused(KVStoreError):
    """The server says why it does not do it. `reason` is the protocol's."""

    def __init__(self, fail: msg.Fail) -> None:
        super().__init__(fail.message)
        self.reason = fail.reason


def _open(address: Address, deadline: float, tls: ClientTls | None) -> transport.Stream:
    timeout = deadline - time.monotonic()
    if timeout <= 0:
        raise transport.Slow("the deadline has passed")
    sock = address.connect(timeout)
    if tls is None:
        return transport.PlainStream(sock)
    try:
        sock = tls.connect(sock, address.host)
        stream = TlsStream(sock)
        stream.shake_hands(deadline)
        return stream
    except BaseException:
        sock.close()
        raise


class Link:
    """Deadlines are on `time.monotonic`, in seconds. After any error it can't be used again.

    is_outrun: another link had the answer first, so that the one due here is of no use.
    """

    def __init__(self, address: Address, hello: msg.Hello, deadline: float, tls: ClientTls | None = None) -> None:
        """Connect and say hello. Raises OSError (Slow at the deadline), Refused or ProtocolError."""
        self._stream = _open(address, deadline, tls)
        self._inbox = transport.Inbox(self._stream)
        self._last_id = self._answered_id = 0
        self.chunk_bytes_max = 2**63
        self.used = False
        self.is_outrun = False
        try:
            welcome, _ = self.ask(hello, deadline)
            if not isinstance(welcome, msg.Welcome):
                raise ProtocolError(f"the server answers a hello with {type(welcome).__name__}")
        except BaseException:
            self.close()
            raise
        self.chunk_bytes_max = welcome.payload_bytes_max
        self.capacity = welcome.capacity

    def ask(self, request: msg.Request, deadline: float) -> tuple[msg.Reply, Head]:
        """Send a request without a payload and read its reply's fields; a hit's payload is still to be received.

        Raises OSError, Refused or ProtocolError.
        """
        try:
            self.post(request, deadline)
        except (BrokenPipeError, ConnectionResetError):
            # The server may have said why before it closed.
            return self.collect(deadline)
        return self.collect(deadline)

    def put(self, request: msg.Put, payload: memoryview, deadline: float) -> msg.Reply:
        """Send a chunk with its payload, flat bytes, and read the reply. Raises as `ask`."""
        self._last_id += 1
        size = len(payload)
        buffers: list[bytes | memoryview] = [msg.encode_request(self._last_id, request, size + HEADER_BYTES)]
        checksum = Checksum(request.key, size)
        try:
            for at in range(0, size, transport.PIECE_BYTES):
                piece = payload[at : at + transport.PIECE_BYTES]
                checksum.add(piece)
                buffers.append(piece)
                if at + len(piece) < size:
                    self._stream.send(buffers, deadline)
                    buffers.clear()
            self._stream.send([*buffers, checksum.header()], deadline)
        except (BrokenPipeError, ConnectionResetError):
            return self.collect(deadline)[0]
        return self.collect(deadline)[0]

    def post(self, request: msg.Request, deadline: float) -> None:
        """Send a request, also before earlier ones were answered. Raises OSError."""
        self._last_id += 1
        self._stream.send([msg.encode_request(self._last_id, request)], deadline)

    def answers_by(self, deadline: float) -> bool:
        """Wait for the next reply to begin; False if it has not by then. Raises OSError."""
        try:
            self._inbox.wait(deadline)
        except transport.Slow:
            return False
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

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

    def receive(self, key: ChunkKey, target: memoryview, deadline: float) -> None:
        """The chunk of the last reply, a hit: its payload straight into `target`, verified.

        Raises OSError, CorruptChunk, ForeignChunk or UnsupportedVersion.
        """
        receive_chunk(self._inbox, key, target, deadline)

    def close(self) -> None:
        """Give the connection up. Idempotent."""
        self._stream.close()
