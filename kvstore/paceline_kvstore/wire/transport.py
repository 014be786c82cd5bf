"""Frames over a blocking socket: few system calls, no copy of payloads, and never much later than a deadline.

The kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) bound each call's time asleep. They don't count the time that a
call is kept busy by a peer that trickles bytes, so a payload is read in pieces, small ones first, and the deadline is
looked at in between: such a peer is cut soon after it. Deadlines are on `time.monotonic`, in seconds.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline_kvstore.codec import as_bytes
from paceline_kvstore.wire.frames import HEAD_BYTES, Head, decode_head

SOCKET_BUFFER_BYTES = 4 << 20
"""Unix sockets move 8 MiB two to three times as fast with this as with the kernel's default."""

AHEAD_BYTES = 512
"""Room for the fields of most requests and a chunk's header; larger would only copy more of each payload twice."""

FIRST_PIECE_BYTES = 16 << 10
PIECE_GROWTH = 4
PIECE_BYTES = 256 << 10
"""What is looked at (for the checksum) right after it was moved is still in the processor's cache."""

_TIMEVAL = struct.Struct("@ll")
_SHORTEST_S = 1e-3
_AS_GOOD = (0.8, 1.1)
"""A timeout that the kernel has is left as it is if it is within these shares of the wanted one."""


class Gone(ConnectionError):
    """The peer closed the connection between two frames."""


class Slow(TimeoutError):
    """The peer didn't take or give all bytes by the deadline."""


class Stream(Protocol):
    """A connected socket, for one thread at a time but for `stop`. Each method raises OSError, Slow at the deadline."""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """All bytes of all buffers, which are flat, from where they are."""
        ...

    def receive(self, target: memoryview, deadline: float, *, whole: bool = False) -> int:
        """Bytes to the front of `target`: what is there, at least one; 0 at the end of the stream.

        whole: wait for all of it as far as one call can; more calls may be needed.
        """
        ...

    @property
    def has_bytes(self) -> bool:
        """True while there are bytes that no wait for the socket tells of."""
        ...

    def fileno(self) -> int: ...
    def end(self) -> None:
        """Send no more."""
        ...

    def stop(self) -> None:
        """Wake whoever waits on the socket: it is over. From any thread."""
        ...

    def close(self) -> None:
        """Stop and give it up."""
        ...


class PlainStream:
    """Implements `Stream` over a Unix or TCP socket."""

    has_bytes = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        left, total = list(buffers), sum(map(len, buffers))
        while total:
            self._set_timeout(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._sock.sendmsg(left)
            except BlockingIOError:
                raise Slow("the peer takes no more bytes") from None
            total -= sent
            while total and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if total and sent:
                left[0] = memoryview(left[0])[sent:]

    def receive(self, target: memoryview, deadline: float, *, whole: bool = False) -> int:
        self._set_timeout(socket.SO_RCVTIMEO, deadline)
        try:
            return self._sock.recv_into(target, 0, socket.MSG_WAITALL if whole else 0)
        except BlockingIOError:
            raise Slow("nothing came in time") from None

    def fileno(self) -> int:
        return self._sock.fileno()

    def end(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop()
        self._sock.close()

    def _set_timeout(self, option: int, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise Slow("the deadline has passed")
        seconds = max(_SHORTEST_S, seconds)  # 0 would mean no limit at all
        least, most = _AS_GOOD
        if not least * seconds <= self._timeouts[option] <= most * seconds:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))
            self._timeouts[option] = seconds


def tune(sock: socket.socket) -> None:
    """Blocking mode, large buffers, no delay of small frames."""
    sock.setblocking(True)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Inbox:
    """The receiving end of a stream, for one thread.

    What comes first of a frame is read in one go, so that a small frame costs one system call; a payload's bytes then
    go straight to where they belong.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._begin: int = 0
        self._end: int = 0

    @property
    def has_bytes(self) -> bool:
        """True while something was read ahead."""
        return self._begin < self._end or self._stream.has_bytes

    def wait(self, deadline: float) -> None:
        """Until the next frame has begun. Raises Gone if the peer closed before it, Slow, another OSError."""
        if self._begin == self._end and not self._fill(deadline):
            raise Gone("the peer closed the connection")

    def head(self, field_bytes_max: int, payload_bytes_max: int, deadline: float) -> Head:
        """The next frame's head. Raises as `wait`, or ProtocolError."""
        self.wait(deadline)
        return decode_head(self.read(HEAD_BYTES, deadline), field_bytes_max, payload_bytes_max)

    def read(self, num_bytes: int, deadline: float) -> bytes:
        """The next bytes of the frame. Raises OSError."""
        if num_bytes > AHEAD_BYTES:
            target = bytearray(num_bytes)
            self.read_into(target, deadline)
            return bytes(target)
        while self._end - self._begin < num_bytes:
            if not self._fill(deadline):
                raise _cut_off()
        taken = bytes(self._ahead[self._begin : self._begin + num_bytes])
        self._begin += num_bytes
        return taken

    def read_into(
        self, target: bytearray | memoryview, deadline: float, on_piece: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill `target` with the next bytes of the frame, telling `on_piece` of each piece. Raises OSError."""
        view = as_bytes(target)
        got = min(len(view), self._end - self._begin)
        view[:got] = self._ahead[self._begin : self._begin + got]
        self._begin += got
        told, ask = 0, FIRST_PIECE_BYTES
        while got < len(view):
            count = self._stream.receive(view[got : got + ask], deadline, whole=True)
            if count == 0:
                raise _cut_off()
            got += count
            ask = min(ask * PIECE_GROWTH, PIECE_BYTES)
            if on_piece is not None:
                on_piece(view[told:got])
                told = got
        if on_piece is not None and told < got:
            on_piece(view[told:got])

    def _fill(self, deadline: float) -> int:
        """Read what is there behind what was read ahead; 0 at the end of the stream."""
        held = self._end - self._begin
        if self._begin:
            self._ahead[:held] = self._ahead[self._begin : self._end]
            self._begin, self._end = 0, held
        count = self._stream.receive(self._ahead[held:], deadline)
        self._end += count
        return count


def _cut_off() -> ConnectionResetError:
    return ConnectionResetError("the peer closed within a frame")
