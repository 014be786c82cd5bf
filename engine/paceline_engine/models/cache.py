"""The folder of converted and downloaded models: bounded in bytes, least recently used first, never one in use.

An entry is a directory in `models/`, `hub/` or `s3/`. A process that uses one holds a shared lock on the entry's `.use`
file for as long as it lives, so the kernel says who uses what, also after a crash; whoever trims needs that lock alone.
The file's modification time is the time of the last use. No torch here.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("models", "hub", "s3")
DEFAULT_LIMIT = 100 * 2**30

logger = logging.getLogger(__name__)
_held: dict[Path, int] = {}  # File descriptors: the kernel closes them when the process ends, and not before.


def hold(path: Path) -> None:
    """Keep the entry that `path` lies in from being removed while this process lives; any other path is nobody's."""
    entry = _entry_of(path)
    if entry is None or entry in _held:
        return
    try:
        file = os.open(_use_file(entry), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # A cache that can't be written can't be trimmed either.
        return
    fcntl.flock(file, fcntl.LOCK_SH)
    os.utime(file)
    _held[entry] = file


def trim(root: Path, limit: int) -> list[Path]:
    """Remove unused entries, longest unused first, until the rest has at most `limit` bytes; what was removed."""
    entries = [entry for kind in KINDS for entry in (root / kind).glob("*") if entry.is_dir()]
    sizes = {entry: size_of(entry) for entry in entries}
    total = sum(sizes.values())
    removed: list[Path] = []
    for entry in sorted(entries, key=_last_use):
        if total <= limit:
            break
        if _remove(entry):
            total -= sizes[entry]
            removed.append(entry)
            logger.info("cache %s: removed %s, %d bytes", root, entry.name, sizes[entry])
    if total > limit:
        logger.warning("cache %s: the entries in use have %d bytes, over the limit of %d", root, total, limit)
    return removed


def size_of(directory: Path) -> int:
    """Bytes of the files below a directory; a link costs nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder, name)).st_size
            except FileNotFoundError:  # Another process cleans up.
                continue
    return total


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel drops the lock when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _entry_of(path: Path) -> Path | None:
    """The entry directory above `path`: the child of a KINDS folder that stands in a cache."""
    for parent in (path, *path.parents):
        if parent.parent.name in KINDS and (parent.parent.parent / "paceline-cache").is_file():
            return parent
    return None


def mark(root: Path) -> None:
    """Say that `root` is a cache, so that no folder that only looks like one is ever trimmed or locked."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "paceline-cache").touch()


def _use_file(entry: Path) -> Path:
    return entry.parent / f"{entry.name}.use"


def _last_use(entry: Path) -> float:
    """Seconds since the epoch; entries that were never used count as old as they are."""
    for path in (_use_file(entry), entry):
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            continue
    return 0.0


def _remove(entry: Path) -> bool:
    """Remove an entry if nobody holds it."""
    with _use_file(entry).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # The lock's file stays: a process that waits for it must not end up with the lock of a file that is gone.
        shutil.rmtree(entry, ignore_errors=True)
        return not entry.exists()
