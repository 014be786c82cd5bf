"""What clients of the node server may take. Must not do I/O."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_kvstore.codec import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the node server. Sizes in bytes, times in seconds.

    chunk_bytes: payload of one chunk. inflight_bytes: memory for puts that are being received, over all connections;
    a put that finds none within inflight_wait_s is not kept. A connection handles one request at a time; what is sent
    ahead waits in the socket's buffer. frame_timeout_s: for a frame to arrive, or a reply to be taken, as a whole.
    idle_timeout_s: between two requests. hello_timeout_s: for a stranger to say who it is.
    """

    connections: int = 256
    chunk_bytes: int = 128 << 20
    inflight_bytes: int = 512 << 20
    inflight_wait_s: float = 1.0
    frame_timeout_s: float = 30.0
    idle_timeout_s: float = 600.0
    hello_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("connections", "chunk_bytes"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, it is {value}")
        if self.inflight_bytes < self.chunk_bytes:
            raise ValueError(
                f"inflight_bytes must have room for a chunk of {self.chunk_bytes} bytes, it is {self.inflight_bytes}"
            )
        for name in ("frame_timeout_s", "idle_timeout_s", "hello_timeout_s"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name} must be more than 0 s, it is {value}")
        if self.inflight_wait_s < 0:
            raise ValueError(f"inflight_wait_s must not be negative, it is {self.inflight_wait_s}")

    @property
    def payload_bytes(self) -> int:
        """Payload of one frame: a chunk with its header."""
        return self.chunk_bytes + HEADER_BYTES
