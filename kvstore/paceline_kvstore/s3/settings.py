"""What the S3 tier can be told, with its bounds. Must not do I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from paceline_kvstore.breaker import BreakerLimits
from paceline_kvstore.s3 import pack

MIB = 1 << 20
MIN_PART_BYTES = 5 * MIB
MAX_PARTS = 10_000
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*")
_PREFIX_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """Where the bucket is and how it is used. Sizes in bytes, times in seconds.

    Credentials: `access_key` and `secret_key` (and `session_token`); or `credentials_dir`, a mounted Secret with files
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, read again every 20 seconds; else boto3's own chain (environment,
    profile, web identity, instance role). `ca_file` is a PEM file of certificate authorities to trust.

    One get reads ranges of about `range_bytes` in parallel on up to `read_workers` connections and is given up after
    `read_deadline`; the breaker bounds how many are under way, `read_bytes` what they hold. Chunks of up to
    `pack_chunk_bytes` go into packs of up to `pack_bytes`, waiting up to `linger` for company; larger than
    `multipart_bytes` goes in parts of `part_bytes`. Puts wait in a queue of up to `queue_bytes` and for up to
    `queue_seconds`, written by `write_workers`; `flush` and `close` wait up to `drain_seconds`. `capacity` bounds what
    this process adds.
    """

    bucket: str
    prefix: str = "paceline"
    endpoint: str | None = None
    region: str | None = None
    storage_class: str | None = None
    path_style: bool | None = None
    ca_file: Path | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    credentials_dir: Path | None = None

    connect_timeout: float = 1.0
    read_timeout: float = 5.0
    read_deadline: float = 10.0
    read_workers: int = 16
    read_attempts: int = 3
    read_bytes: int = 512 * MIB
    range_bytes: int = 8 * MIB
    hedge_share: float = 0.03

    write_timeout: float = 60.0
    write_workers: int = 4
    queue_bytes: int = 512 * MIB
    queue_seconds: float = 600.0
    drain_seconds: float = 60.0
    linger: float = 0.05
    pack_chunk_bytes: int = 1 * MIB
    pack_bytes: int = 8 * MIB
    multipart_bytes: int = 64 * MIB
    part_bytes: int = 16 * MIB
    retry_seconds: float = 0.1
    retry_seconds_max: float = 10.0
    capacity: int = 1 << 62
    breaker: BreakerLimits = field(default_factory=BreakerLimits)

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise ValueError(f"bucket {self.bucket!r} is no bucket's name: 3 to 63 of a-z, 0-9, '.' and '-'")
        if not _PREFIX.fullmatch(self.prefix) or len(self.prefix) > _PREFIX_MAX:
            raise ValueError(
                f"prefix {self.prefix!r} must be words of A-Z, a-z, 0-9, '_', '.', '=', '-' joined by '/', without "
                f"a '/' at either end, of at most {_PREFIX_MAX} characters"
            )
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.endpoint!r} must begin with http:// or https://")
        self._check_credentials()
        self._check_numbers()

    def _check_credentials(self) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key go together: set both or neither")
        if self.access_key is not None and self.credentials_dir is not None:
            raise ValueError("access_key and credentials_dir are two sources of credentials: set one")
        if self.session_token is not None and self.access_key is None:
            raise ValueError("session_token belongs to an access_key: set access_key and secret_key too")

    def _check_numbers(self) -> None:
        for name in ("read_workers", "read_attempts", "write_workers"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be 1 or more, it is {value}")
        for name in (
            "connect_timeout",
            "read_timeout",
            "read_deadline",
            "write_timeout",
            "retry_seconds",
            "queue_seconds",
        ):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name} must be more than 0 seconds, it is {value}")
        for name in ("queue_bytes", "read_bytes", "pack_chunk_bytes", "capacity", "linger"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, it is {value}")
        if self.range_bytes < pack.PEEK_BYTES:
            raise ValueError(f"range_bytes must be {pack.PEEK_BYTES} or more, it is {self.range_bytes}")
        if not self.pack_chunk_bytes <= self.pack_bytes <= pack.CHUNKS_BYTES_MAX:
            raise ValueError(
                f"pack_bytes must be pack_chunk_bytes ({self.pack_chunk_bytes}) to {pack.CHUNKS_BYTES_MAX}, it is "
                f"{self.pack_bytes}"
            )
        if self.part_bytes < MIN_PART_BYTES:
            raise ValueError(f"part_bytes must be {MIN_PART_BYTES} or more, as S3 has it; it is {self.part_bytes}")
