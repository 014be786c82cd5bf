"""Compiles what a launcher would launch, for a GPU that isn't here, and says what came out.

The launcher runs as it is, on CPU tensors of the right types; only its last step, the launch, is left out. So what is
looked at is what would run. Not under TRITON_INTERPRET, which replaces the compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Shared memory that one program may have, in bytes: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024}
# From the PTX: which tensor-core instruction multiplies matrices, and whether loads go around the registers.
_MARKS = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "cp.async": "cp.async", "tma": "cp.async.bulk.tensor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel as compiled. spilled: bytes of local memory a thread uses; shared: bytes a program uses."""

    kernel: str
    registers: int
    spilled: int
    shared: int
    instructions: tuple[str, ...]


class _AbsentGpu:
    """What the compiler and a launcher ask of a driver, for a GPU of compute capability `arch` / 10."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        # Compiled kernels are remembered by device.
        return self._arch

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def nothing_launched(arch: int, seen: list[Any]) -> Iterator[None]:
    """Add (name, compiled kernel) to `seen` where a kernel would be launched on compute capability `arch` / 10."""
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        seen.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_AbsentGpu(arch))
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = active


def compile_launches(launch: Callable[[], object], arch: int) -> list[Compiled]:
    """Each kernel that `launch` would launch on compute capability `arch` / 10 (80, 90), in order."""
    seen: list[Any] = []
    with nothing_launched(arch, seen):
        launch()
    return [_inspect(name, kernel) for name, kernel in seen]


def _inspect(name: str, kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", usage)}
    ptx = kernel.asm["ptx"]
    return Compiled(
        kernel=name,
        registers=found["REG"],
        spilled=found["LOCAL"] + found["STACK"],
        shared=kernel.metadata.shared,
        instructions=tuple(label for label, mark in _MARKS.items() if mark in ptx),
    )
