"""Frames over a blocking socket: one system call a chunk, no copy of payloads, and never later than a deadline.

The kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO) bound the time that a call is asleep. They don't count the time
that a peer keeps it busy by trickling bytes, so what is asked for grows from call to call and the deadline is looked at
in between: such a peer is cut after a few times the deadline. Deadlines are on `time.monotonic`, in seconds.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence

from paceline_kvstore.codec import Buffer, as_bytes
from paceline_kvstore.wire.frames import HEAD_BYTES, Head, decode_head

SOCKET_BUFFER_BYTES = 4 << 20
"""Unix sockets move 8 MiB two to three times as fast with this as with the kernel's default."""

AHEAD_BYTES = 512
"""Room for the fields of most requests and a chunk's header; larger would only copy more of each payload twice."""

FIRST_READ_BYTES = 16 << 10
READ_GROWTH = 4

_TIMEVAL = struct.Struct("@ll")
_SHORTEST_S = 1e-3


class Gone(ConnectionError):
    """The peer closed the connection between two frames."""


class Slow(TimeoutError):
    """The peer didn't take or give all bytes by the deadline."""


def tune(sock: socket.socket) -> None:
    """Blocking mode, large buffers, no delay of small frames."""
    sock.setblocking(True)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send(sock: socket.socket, buffers: Sequence[Buffer], deadline: float) -> None:
    """All bytes of all buffers, from where they are. Raises Slow or OSError."""
    left = [as_bytes(buffer) for buffer in buffers if len(as_bytes(buffer))]
    while left:
        _set_timeout(sock, socket.SO_SNDTIMEO, deadline)
        try:
            sent = sock.sendmsg(left)
        except BlockingIOError:
            raise Slow("the peer takes no more bytes") from None
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if left and sent:
            left[0] = left[0][sent:]


class Inbox:
    """The receiving end of a socket, for one thread.

    What comes first of a frame is read in one go, so that a small frame costs one system call and a chunk two; a
    payload's bytes then go straight to where they belong.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._begin = self._end = 0

    @property
    def has_bytes(self) -> bool:
        """True while something was read ahead."""
        return self._begin < self._end

    def head(self, field_bytes_max: int, payload_bytes_max: int, deadline: float) -> Head:
        """The next frame's head. Raises Gone if the peer closed before it, Slow, another OSError, or ProtocolError."""
        if not self.has_bytes:
            _set_timeout(self._sock, socket.SO_RCVTIMEO, deadline)
            try:
                count = self._sock.recv_into(self._ahead)
            except BlockingIOError:
                raise Slow("nothing came in time") from None
            if count == 0:
                raise Gone("the peer closed the connection")
            self._begin, self._end = 0, count
        return decode_head(self.read(HEAD_BYTES, deadline), field_bytes_max, payload_bytes_max)

    def read(self, num_bytes: int, deadline: float) -> bytes:
        """The next bytes of the frame. Raises OSError."""
        if self._end - self._begin >= num_bytes:
            taken = bytes(self._ahead[self._begin : self._begin + num_bytes])
            self._begin += num_bytes
            return taken
        target = bytearray(num_bytes)
        self.read_into(target, deadline)
        return bytes(target)

    def read_into(self, target: bytearray | memoryview, deadline: float) -> None:
        """Fill `target` with the next bytes of the frame. Raises OSError."""
        view = as_bytes(target)
        got = min(len(view), self._end - self._begin)
        view[:got] = self._ahead[self._begin : self._begin + got]
        self._begin += got
        ask = FIRST_READ_BYTES
        while got < len(view):
            _set_timeout(self._sock, socket.SO_RCVTIMEO, deadline)
            try:
                count = self._sock.recv_into(view[got : got + ask], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise Slow(f"{got} of {len(view)} bytes came in time") from None
            if count == 0:
                raise ConnectionResetError("the peer closed within a frame")
            got += count
            ask *= READ_GROWTH


def close(sock: socket.socket) -> None:
    """Wake whoever waits on the socket and give it up."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _set_timeout(sock: socket.socket, option: int, deadline: float) -> None:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise Slow("the deadline has passed")
    seconds = max(_SHORTEST_S, seconds)  # 0 would mean no limit at all
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))
