"""NVML's shared library, built from fake_nvml.cpp, and its switches."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
SONAME = "libnvidia-ml.so.1"


def build(compiler: str, folder: Path) -> Path:
    """Put the library into a folder, under the name that the bindings look for."""
    library = folder / SONAME
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library


class FakeNvml:
    """Cards as a test wants them. Once loaded, the library is also what the bindings get when they open its name."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def has_cards(self, count: int) -> None:
        """That many, whole and well."""
        self._library.fake_reset(count)

    def partition(self, card: int, parts: int) -> None:
        self._library.fake_partition(card, parts)

    def has_performance_monitoring(self, card: int) -> None:
        self._library.fake_gpm(card)

    def fail(self, function: str, code: int, card: int = -1) -> None:
        """Have a call, or all of them ("*"), return an error code; 0 heals it."""
        self._library.fake_fail(function.encode(), card, code)

    def xid(self, card: int, code: int) -> None:
        self._library.fake_xid(card, ctypes.c_ulonglong(code))
