"""Folders of this machine that stand in for pods' volumes and outlive the pods, so that a laptop's disk tier does.

Pods of one workload (ServiceAccount) share a row of numbered folders, each used by one pod at a time, also over several
runs that share the state folder: a lock beside it says so. A new pod takes the free folder that was used last.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from paceline_cli.node.pod import Pod

_LOCK = ".lock"


class KeptFolders:
    """`volumes`: names of the volumes that are kept. Raises OSError where the folders can't be made."""

    def __init__(self, root: Path, volumes: frozenset[str]) -> None:
        self._root = root
        self._volumes = volumes
        self._held: dict[tuple[str, str], tuple[Path, int]] = {}

    def claim(self, pod: Pod) -> None:
        """A folder for each volume of the pod that is kept; idempotent per pod uid."""
        for volume in pod.volumes:
            if volume.name in self._volumes and (pod.uid, volume.name) not in self._held:
                self._held[pod.uid, volume.name] = self._take(self._root / f"{pod.namespace}_{pod.service_account}")

    def path(self, pod: Pod, volume: str) -> Path | None:
        """The folder that was claimed, None for a volume that is not kept."""
        held = self._held.get((pod.uid, volume))
        return held[0] if held else None

    def release(self, pod: Pod) -> None:
        """Gives the pod's folders back, with what is in them."""
        for key in [key for key in self._held if key[0] == pod.uid]:
            folder, lock = self._held.pop(key)
            _lock_of(folder).touch()
            os.close(lock)

    def _take(self, row: Path) -> tuple[Path, int]:
        row.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in _candidates(row):
            lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            folder.mkdir(exist_ok=True, mode=0o700)
            return folder, lock
        raise AssertionError("there is always another number")


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _candidates(row: Path) -> Iterator[Path]:
    """Folders that are there, the one used last first; then new ones."""
    locks = [lock for lock in row.glob(f"*{_LOCK}") if lock.name.removesuffix(_LOCK).isdigit()]
    yield from (lock.with_suffix("") for lock in sorted(locks, key=lambda lock: lock.stat().st_mtime, reverse=True))
    taken = {lock.name.removesuffix(_LOCK) for lock in locks}
    number = 0
    while True:
        if str(number) not in taken:
            yield row / str(number)
        number += 1
