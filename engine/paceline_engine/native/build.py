"""Compiles the C++ sources beside this file into one shared library, once for a machine.

The package installs where no compiler is. `paceline-engine build-native`, which `make setup` and images run, compiles
into the Python environment; without it the first engine that starts compiles (seconds), under a lock, into a folder of
the cache named after sources, flags and compiler. The library appears by rename. Imports no torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libpaceline.so"
COMMON_FLAGS = ("-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-ffp-contract=fast", "-Wno-maybe-uninitialized")
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")
# kernels.cpp is compiled once for each; api.cpp picks the widest that the CPU has.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx512": AVX2_FLAGS + AVX512_FLAGS, "avx2": AVX2_FLAGS, "generic": ()},
    "aarch64": {"generic": ()},
}
COMPILE_SECONDS_MAX = 600

logger = logging.getLogger(__name__)


class NativeBuildError(RuntimeError):
    """The library can't be had here; the message is one line that says why."""


def find_compiler() -> str | None:
    """$CXX, or g++, or c++; None if there is none."""
    chosen = os.environ.get("CXX")
    return next((path for name in (chosen, "g++", "c++") if name and (path := shutil.which(name))), None)


def installed_dir() -> Path:
    """Where this Python environment keeps compiled kernels."""
    return Path(sys.prefix) / "lib" / "paceline" / "native"


def ensure_library(cache_dir: Path) -> Path:
    """The library for this machine: prepared, from the cache, or compiled now. Raises NativeBuildError.

    Prepared is what `build_into` wrote to $PACELINE_NATIVE_DIR or `installed_dir`.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in VARIANTS:
        raise NativeBuildError(f"no native kernels for {sys.platform} on {machine}")
    source_key = _source_key(machine)
    for prepared in filter(None, (os.environ.get("PACELINE_NATIVE_DIR"), installed_dir())):
        if (found := Path(prepared) / source_key / LIBRARY).is_file():
            return found
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError("no C++ compiler (g++, c++ or $CXX) was found")
    folder = cache_dir / "native" / f"{source_key}-{_compiler_key(compiler)}"
    if (folder / LIBRARY).is_file():
        return folder / LIBRARY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / LIBRARY).is_file():
                compile_library(compiler, machine, folder / LIBRARY)
    except OSError as error:
        raise NativeBuildError(f"can't write the compiled kernels to {folder}: {error.strerror}") from error
    return folder / LIBRARY


def build_into(directory: Path) -> Path:
    """Compile into `directory` unless that is done; the library's path. Raises NativeBuildError."""
    machine = platform.machine()
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError("no C++ compiler (g++, c++ or $CXX) was found")
    if sys.platform != "linux" or machine not in VARIANTS:
        raise NativeBuildError(f"no native kernels for {sys.platform} on {machine}")
    target = directory / _source_key(machine) / LIBRARY
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        compile_library(compiler, machine, target)
    except OSError as error:
        raise NativeBuildError(f"can't write {target}: {error.strerror}") from error
    return target


def compile_library(compiler: str, machine: str, target: Path) -> None:
    """Compile all units at the same time and link them; `target` appears complete. Raises NativeBuildError."""
    logger.info("compiling the CPU kernels with %s (once for this machine)", compiler)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        units: list[tuple[str, Sequence[str]]] = [
            (f"kernels-{isa}.o", (str(SOURCES / "kernels.cpp"), f"-DPACELINE_ISA={isa}", *flags))
            for isa, flags in VARIANTS[machine].items()
        ]
        units += [(f"{name}.o", (str(SOURCES / f"{name}.cpp"),)) for name in ("api", "decoder", "pool")]
        objects = [str(Path(scratch) / name) for name, _ in units]
        running = [
            _start([compiler, *COMMON_FLAGS, "-c", *arguments, "-o", output])
            for output, (_, arguments) in zip(objects, units, strict=True)
        ]
        try:
            for process in running:
                _finish(process)
        finally:
            for process in running:
                _end(process)
        linked = Path(scratch) / LIBRARY
        _finish(_start([compiler, "-shared", "-o", str(linked), *objects, "-lpthread"]))
        linked.rename(target)
    logger.info("compiled the CPU kernels: %s", target)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=COMPILE_SECONDS_MAX)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise NativeBuildError(f"compiling took over {COMPILE_SECONDS_MAX} s") from error
    if process.returncode != 0:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
        raise NativeBuildError(f"the compiler failed: {first}")


def _end(process: subprocess.Popen[str]) -> None:
    """After one unit failed nobody waits for the others: no compiler outlives this call, and no pipe stays open."""
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _source_key(machine: str) -> str:
    digest = blake2b(digest_size=12, person=b"paceline-native")
    digest.update(repr((machine, COMMON_FLAGS, VARIANTS[machine])).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _compiler_key(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return blake2b(done.stdout.encode(), digest_size=4).hexdigest()
