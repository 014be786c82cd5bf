"""Records what a process asks of a folder's files, and makes the folders that a power cut could leave behind.

The device promises what POSIX does and no more: what a file was given before its last sync is there, of the rest any
sectors may be; names changed in order, as many of them as a journal had written, at least those before the folder's
last sync.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

SECTOR = 512
FOLDER = 0
"""The file number of the folder itself."""


@dataclass(frozen=True)
class Call:
    """One change. file: a number given when it was created. A rename to nothing is an unlink."""

    kind: Literal["write", "cut", "sync", "name", "mark"]
    file: int = FOLDER
    at: int = 0
    data: bytes = b""
    name: str = ""
    target: str | None = None
    mark: Any = None


class Recorder:
    """Wraps the calls of `os` while it is patched in. One thread at a time. What the folder has already is safe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls: list[Call] = []
        self._numbers: dict[int, int] = {}
        self._last = FOLDER
        self._patch = monkeypatch
        for path in sorted(folder.iterdir()):
            self._add(path, path.stat().st_ino)
            self.calls += [Call("write", self._last, data=path.read_bytes()), Call("sync", self._last)]
        self.calls.append(Call("sync"))
        for name in ("open", "pwritev", "ftruncate", "fdatasync", "fsync", "rename", "unlink"):
            self._wrap(name, getattr(self, f"_{name}"))

    def mark(self, what: Any) -> None:
        """Note that something was promised by now."""
        self.calls.append(Call("mark", mark=what))

    def _wrap(self, name: str, note: Callable[..., None]) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            is_new = name == "open" and not os.path.lexists(arguments[0])
            result = original(*arguments, **more)
            note(*arguments, **({"fd": result, "is_new": is_new} if name == "open" else {}))
            return result

        self._patch.setattr(os, name, call)

    def _number(self, fd: int) -> int:
        return self._numbers.get(os.fstat(fd).st_ino, FOLDER)

    def _open(self, path: Any, *_: Any, fd: int, is_new: bool) -> None:
        if is_new:
            self._add(Path(path), os.fstat(fd).st_ino)

    def _add(self, path: Path, inode: int) -> None:
        self._last += 1
        self._numbers[inode] = self._last
        self.calls.append(Call("name", self._last, target=path.name))

    def _pwritev(self, fd: int, parts: Any, offset: int) -> None:
        self.calls.append(Call("write", self._number(fd), offset, b"".join(parts)))

    def _ftruncate(self, fd: int, size: int) -> None:
        self.calls.append(Call("cut", self._number(fd), size))

    def _fdatasync(self, fd: int) -> None:
        self.calls.append(Call("sync", self._number(fd)))

    def _fsync(self, fd: int) -> None:
        self.calls.append(Call("sync", self._number(fd)))

    def _rename(self, source: Any, target: Any) -> None:
        self.calls.append(Call("name", name=Path(source).name, target=Path(target).name))

    def _unlink(self, path: Any) -> None:
        self.calls.append(Call("name", name=Path(path).name))


def moments(calls: list[Call], dice: random.Random, num: int) -> list[int]:
    """Numbers of calls after which to cut: any, and as often those where several files wait for a sync that is next."""
    unsynced: set[int] = set()
    crowded: list[int] = []
    for index, call in enumerate(calls):
        if call.kind == "sync" and call.file != FOLDER:
            crowded += [index] * (len(unsynced) > 1)
            unsynced.discard(call.file)
        elif call.kind == "write":
            unsynced.add(call.file)
    return [dice.choice(crowded) if number % 2 else dice.randrange(1, len(calls)) for number in range(num)]


def leave_behind(calls: list[Call], folder: Path, dice: random.Random) -> None:
    """Make a folder of what is on the device when the power goes after these calls.

    Half the time it kept of each write only the beginning, the other half any share of all sectors.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    synced = {call.file: index for index, call in enumerate(calls) if call.kind == "sync"}
    only_heads = dice.random() < 0.5
    share = 1.0 if only_heads else dice.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    contents: dict[int, bytearray] = {}
    for index, call in enumerate(calls):
        is_safe = index < synced.get(call.file, -1)
        content = contents.setdefault(call.file, bytearray())
        if call.kind == "cut" and (is_safe or dice.random() < share):
            del content[call.at :]
            content.extend(bytes(call.at - len(content)))
        elif call.kind == "write":
            for start in range(0, len(call.data), SECTOR):
                if is_safe or (start == 0 if only_heads else dice.random() < share):
                    end = call.at + start
                    content.extend(bytes(max(0, end - len(content))))
                    content[end : end + SECTOR] = call.data[start : start + SECTOR]
    least = len(calls) if only_heads else synced.get(FOLDER, -1)
    for name, number in _names(calls, least, dice).items():
        (folder / name).write_bytes(contents.get(number, b""))


def _names(calls: list[Call], synced: int, dice: random.Random) -> dict[str, int]:
    changes = [index for index, call in enumerate(calls) if call.kind == "name"]
    least = sum(index < synced for index in changes)
    names: dict[str, int] = {}
    for index in changes[: dice.randint(least, len(changes))]:
        call = calls[index]
        number = names.pop(call.name, None) if call.name else call.file
        if call.target is not None and number is not None:
            names[call.target] = number
    return names
