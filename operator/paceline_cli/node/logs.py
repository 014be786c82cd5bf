"""One log file per container, bounded: at the size cap it is renamed to `.1` and a new one begins."""

import os
from pathlib import Path
from typing import BinaryIO

LOG_BYTES_MAX = 10 * 1024 * 1024
LOG_FILES_MAX = 3
_TAIL_BYTES = 2048


class LogFile:
    """Appends bytes. Total size is at most `files_max` * `bytes_max` plus one chunk."""

    def __init__(self, path: Path, bytes_max: int = LOG_BYTES_MAX, files_max: int = LOG_FILES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._files_max = files_max
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._stream = self._open()

    def _open(self) -> BinaryIO:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Appends `chunk`, rotating first if the file is full."""
        if self._stream.tell() >= self._bytes_max:
            self._rotate()
        self._stream.write(chunk)

    def _rotate(self) -> None:
        self._stream.close()
        for number in range(self._files_max - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)
        if self._files_max == 1:
            self.path.unlink(missing_ok=True)
        self._stream = self._open()

    def close(self) -> None:
        """No more writes."""
        self._stream.close()


def tail(path: Path, size: int = _TAIL_BYTES) -> str:
    """The last `size` bytes of a log as text; "" if there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - size))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
