"""GPUs read through NVML, the driver's management library, with NVIDIA's own bindings (pynvml).

The bindings are imported, and the library is opened, only when an engine that runs on a GPU asks for it. What a card,
a driver or a container's rights don't give is left out; a card that gives nothing, or is lost, is down. Units are
NVML's turned into Prometheus' base units: ratios, bytes, watts, joules, hertz, degrees Celsius.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline_engine.telemetry.nvml_errors import DeviceLost, Supported
from paceline_engine.telemetry.nvml_history import BandwidthMeter, XidCounter
from paceline_engine.telemetry.reading import NoTelemetry, Reading, Sample
from paceline_engine.telemetry.visible import Card, Part, Target, visible_targets

# Bits of NVML's clock event reasons that hold clocks below what was asked for, and how they are called here.
CLOCK_LIMITS = {
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}

logger = logging.getLogger(__name__)


def open_gpus(ordinals: Sequence[int]) -> NvmlReader:
    """The GPUs that CUDA numbers `ordinals` in this process's environment. Raises NoTelemetry."""
    try:
        import pynvml
    except ImportError as error:
        raise NoTelemetry("the Python package nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
        targets = visible_targets(_cards(pynvml), os.environ.get("CUDA_VISIBLE_DEVICES"))
        known = [targets[ordinal] for ordinal in ordinals if ordinal < len(targets)]
        if len(known) < len(ordinals):
            logger.warning("NVML lists %d of the engine's %d GPUs: metrics are of those", len(known), len(ordinals))
        return NvmlReader([NvmlGpu(pynvml, target) for target in known])
    except (pynvml.NVMLError, DeviceLost) as error:
        raise NoTelemetry(f"NVML says: {error}") from error


def _cards(nvml: Any) -> list[Card]:
    """Every card that this process may see, in the driver's order; a broken one keeps its place, without a name."""
    cards: list[Card] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            cards.append(Card(index=index, uuid=nvml.nvmlDeviceGetUUID(handle), parts=_parts(nvml, handle)))
        except (nvml.NVMLError, DeviceLost):
            cards.append(Card(index=index, uuid=""))
    return cards


def _parts(nvml: Any, card: Any) -> tuple[Part, ...] | None:
    """The card's MIG devices; None if it isn't partitioned."""
    ask = Supported(nvml)
    mode = ask(partial(nvml.nvmlDeviceGetMigMode, card))
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    parts: list[Part] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        except nvml.NVMLError_NotFound:
            continue  # Places are not filled in order.
        parts.append(
            Part(
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(handle),
                gpu_instance=nvml.nvmlDeviceGetGpuInstanceId(handle),
                compute_instance=nvml.nvmlDeviceGetComputeInstanceId(handle),
            )
        )
    return tuple(parts)


class NvmlReader:
    """All GPUs of an engine."""

    def __init__(self, gpus: Sequence[NvmlGpu]) -> None:
        self._gpus = tuple(gpus)

    def read(self) -> tuple[Reading, ...]:
        """One reading of each; none of them raises."""
        return tuple(gpu.read() for gpu in self._gpus)


class NvmlGpu:
    """One GPU. Memory is of the part that the engine has; power, clocks and errors are of the whole card."""

    def __init__(self, nvml: Any, target: Target) -> None:
        self._nvml = nvml
        self._ask = Supported(nvml)
        self._card = nvml.nvmlDeviceGetHandleByIndex(target.card.index)
        self._device = self._card
        if target.part is not None:
            self._device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(self._card, target.part.index)
        gpu_instance = target.part.gpu_instance if target.part is not None else None
        self._label, self._uuid = target.label, target.uuid
        self._name = self._ask(partial(nvml.nvmlDeviceGetName, self._card)) or "unknown"
        self._bandwidth = BandwidthMeter(nvml, self._card, gpu_instance)
        self._xids = XidCounter(nvml, self._card, target.label)
        self._was_up = True

    def read(self) -> Reading:
        """What the GPU says now."""
        self._xids.update()
        problem, values = "it answers no question", ()
        try:
            values = tuple(self._values())
        except DeviceLost as error:
            problem = str(error)
        up = bool(values)
        if up != self._was_up:
            self._was_up = up
            logger.warning("GPU %s (%s) %s", self._label, self._uuid, "answers again" if up else f"is down: {problem}")
        return Reading(
            gpu=self._label, uuid=self._uuid, name=self._name, up=up, values=values, counts=self._xids.samples()
        )

    def _values(self) -> list[Sample]:
        """Everything that this GPU gives. Raises DeviceLost."""
        nvml, card = self._nvml, self._card
        uncorrected, corrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        since_driver_load = nvml.NVML_VOLATILE_ECC
        samples = [*self._utilization(), *self._memory(), *self._clock_limits()]
        add = partial(self._add, samples)
        add("power_watts", partial(nvml.nvmlDeviceGetPowerUsage, card), 1e-3)
        add("energy_joules", partial(nvml.nvmlDeviceGetTotalEnergyConsumption, card), 1e-3)
        add("temperature_celsius", partial(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU))
        add("sm_clock_hertz", partial(nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_SM), 1e6)
        add("memory_clock_hertz", partial(nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_MEM), 1e6)
        add("pcie_replays", partial(nvml.nvmlDeviceGetPcieReplayCounter, card))
        for label, kind in (("corrected", corrected), ("uncorrected", uncorrected)):
            add("ecc_errors", partial(nvml.nvmlDeviceGetTotalEccErrors, card, kind, since_driver_load), label=label)
        return samples

    def _add(
        self, samples: list[Sample], name: str, read: Callable[[], float], unit: float = 1.0, label: str = ""
    ) -> None:
        value = self._ask(read)
        if value is not None:
            samples.append(Sample(f"paceline_engine_gpu_{name}", value * unit, label))

    def _utilization(self) -> list[Sample]:
        """Shares of time, which a partitioned card doesn't give, and of bandwidth, which cards before Hopper don't."""
        samples: list[Sample] = []
        rates = self._ask(partial(self._nvml.nvmlDeviceGetUtilizationRates, self._device))
        if rates is not None:
            samples.append(Sample("paceline_engine_gpu_busy_ratio", rates.gpu / 100))
            samples.append(Sample("paceline_engine_gpu_memory_busy_ratio", rates.memory / 100))
        bandwidth = self._bandwidth.read()
        if bandwidth is not None:
            samples.append(Sample("paceline_engine_gpu_memory_bandwidth_ratio", bandwidth))
        return samples

    def _memory(self) -> list[Sample]:
        """Used without what the driver keeps for itself, where the driver is new enough to tell them apart."""
        read = partial(self._nvml.nvmlDeviceGetMemoryInfo, self._device)
        memory = self._ask(partial(read, version=self._nvml.nvmlMemory_v2)) or self._ask(read)
        if memory is None:
            return []
        return [
            Sample("paceline_engine_gpu_memory_used_bytes", memory.used),
            Sample("paceline_engine_gpu_memory_total_bytes", memory.total),
        ]

    def _clock_limits(self) -> list[Sample]:
        # Drivers before R535 know the question by its old name.
        reasons = self._ask(partial(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, self._card))
        if reasons is None:
            reasons = self._ask(partial(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._card))
        if reasons is None:
            return []
        return [
            Sample("paceline_engine_gpu_clock_limited", float(bool(reasons & bit)), reason)
            for reason, bit in CLOCK_LIMITS.items()
        ]
