"""The internal bearer token, read from a mounted file and read again when the file changes."""

from __future__ import annotations

import hmac
import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0


class TokenFile:
    """The file's current content without surrounding white space.

    Raises ValueError when the file is unreadable or empty at the start. Later the last good token stays in use: a
    Secret volume is swapped under us, and a moment without it must not fail requests.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checked_s = time.monotonic()
        self._seen: object = None
        try:
            self._seen, self._token = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the internal token file {path} cannot be read: {error}") from error
        if not self._token:
            raise ValueError(f"the internal token file {path} is empty: write the token into it")

    def current(self) -> str:
        now = time.monotonic()
        if now - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now
            self._refresh()
        return self._token

    def matches(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries the token; compared in constant time."""
        expected = f"Bearer {self.current()}".encode()
        return hmac.compare_digest((authorization or "").encode(), expected)

    def _refresh(self) -> None:
        try:
            if self._signature() == self._seen:
                return
            seen, token = self._read()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("The internal token file cannot be read, the last token stays in use: %s", error)
            return
        if token:
            self._seen, self._token = seen, token

    def _read(self) -> tuple[object, str]:
        return self._signature(), self._path.read_text().strip()

    def _signature(self) -> object:
        status = self._path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
