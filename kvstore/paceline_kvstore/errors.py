"""What can be wrong with a chunk or its place. To a reader a bad chunk is a miss: drop it, count it, recompute."""

from __future__ import annotations

from paceline_kvstore.breaker import Outcome


class KVStoreError(Exception):
    """Root of the package's errors."""


class CorruptChunk(KVStoreError):
    """The bytes are not what was written: wrong magic, length or checksum."""


class ForeignChunk(KVStoreError):
    """An intact chunk that belongs to another key than the one asked for."""


class UnsupportedVersion(KVStoreError):
    """The chunk names a format version that this reader does not know."""


class FolderUnusable(KVStoreError):
    """A tier cannot open its folder: it is in use, or the file system says no."""


class TierFault(KVStoreError):
    """A place could not answer. `outcome` is what a breaker makes of it, `status` the HTTP status where there was one.

    `retryable` is False where the same call can never succeed. `retry_after` is the pause in seconds it asked for.
    """

    def __init__(
        self,
        message: str,
        outcome: Outcome = Outcome.ERROR,
        *,
        status: int | None = None,
        retryable: bool = True,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
