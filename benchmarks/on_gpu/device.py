"""The device that is measured: its facts, its limits, and the time of work on it."""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F

# Times the L2 of the largest card.
FLUSH_BYTES = 256 * 2**20
MIN_REPEATS, MAX_REPEATS, SECONDS_A_CASE = 10, 200, 0.25
SMI_FACTS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


@dataclass(frozen=True, slots=True)
class Limits:
    """bandwidth: of device memory, bytes/s; flops: dense bfloat16 products, FLOP/s."""

    bandwidth: float
    flops: float


# NVIDIA H200 (SXM) datasheet: 4.8 TB/s; 1,979 TFLOP/s of bfloat16 with sparsity, half of it without.
DATASHEETS = {"NVIDIA H200": Limits(4.8e12, 989e12)}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: the median, and how far the 10th and 90th percentile are apart, over the median."""

    seconds: float
    spread: float
    repeats: int
    is_graph: bool


class Device:
    """A GPU, or the CPU in a dry run."""

    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.torch = torch.device("cpu" if is_dry else "cuda")
        self.name = "CPU (dry run)" if is_dry else torch.cuda.get_device_name()
        self.datasheet = DATASHEETS.get(self.name)
        self.measured: Limits | None = None
        self._flush = None if is_dry else torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.torch)

    def facts(self) -> dict[str, Any]:
        """What a reader needs to place the numbers."""
        facts: dict[str, Any] = {"name": self.name, "torch": torch.__version__, "cuda": torch.version.cuda}
        facts |= {package: _version(package) for package in ("triton", "transformers", "numpy")}
        if not self.is_dry:
            properties = torch.cuda.get_device_properties(0)
            facts["capability"] = f"{properties.major}.{properties.minor}"
            facts["processors"] = properties.multi_processor_count
            facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
            facts["driver"] = nvidia_smi("driver_version").get("driver_version")
        return facts

    def state(self) -> dict[str, str]:
        """Clocks, power and temperature as they are now."""
        return {} if self.is_dry else nvidia_smi(SMI_FACTS)

    def is_alive(self) -> bool:
        """Whether the device still takes work of this process."""
        try:
            if not self.is_dry:
                torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def free(self) -> None:
        """Give back memory that nobody holds."""
        gc.collect()
        if not self.is_dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def time(self, run: Callable[[], object], seconds: float = SECONDS_A_CASE) -> Timing:
        """Time of `run` with a cold L2, as a replayed graph, so that launch gaps are left out."""
        if self.is_dry:
            begin = time.perf_counter()
            run()
            return Timing(time.perf_counter() - begin, 0.0, 1, False)
        replay, is_graph = self._captured(run)
        first = statistics.median(self._times(replay, 3))
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(seconds / max(first, 1e-6))))
        times = sorted(self._times(replay, repeats))
        middle = statistics.median(times)
        spread = (times[int(0.9 * (repeats - 1))] - times[int(0.1 * (repeats - 1))]) / middle
        return Timing(middle, spread, repeats, is_graph)

    def _captured(self, run: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        for _ in range(2):  # Compiles and loads.
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError:
            # Waits for the device or sizes something by its data.
            torch.cuda.synchronize()
            return run, False
        return graph.replay, True

    def _times(self, run: Callable[[], object], repeats: int) -> list[float]:
        assert self._flush is not None
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000.0 for begin, end in events]

    def measure_limits(self) -> tuple[Limits, dict[str, str]]:
        """What a large copy and a large bfloat16 product reach here, on random data; and the state right after."""
        size, rank = (2**20, 64) if self.is_dry else (2 * 2**30, 8192)
        source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=self.torch)
        target = torch.empty_like(source)
        copy = self.time(partial(target.copy_, source))
        del source, target
        a, b = (torch.randn(rank, rank, dtype=torch.bfloat16, device=self.torch) for _ in range(2))
        product = self.time(lambda: F.linear(a, b))
        self.measured = Limits(2 * size / copy.seconds, 2 * rank**3 / product.seconds)
        return self.measured, self.state()


def num_processors(device: torch.device) -> int:
    """What a launcher is told where it spreads few programs; a few on the CPU, so that it does so there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def nvidia_smi(names: str) -> dict[str, str]:
    """Values of the first GPU by name; empty where nvidia-smi can't say."""
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names.split(","), (value.strip() for value in done.stdout.split(",")), strict=False))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
