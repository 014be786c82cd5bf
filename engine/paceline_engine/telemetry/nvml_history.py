"""What NVML tells only of a span of time: critical errors since the last look, bandwidth between two looks."""

from __future__ import annotations

import ctypes
import logging
from functools import partial
from typing import Any

from paceline_engine.telemetry.nvml_errors import DeviceLost, Supported
from paceline_engine.telemetry.reading import Sample

# Errors come in storms; the rest are counted at the next look.
MAX_EVENTS_PER_LOOK = 64

logger = logging.getLogger(__name__)


class XidCounter:
    """Counts a card's XID errors, NVIDIA's codes of critical ones, from when it was made."""

    def __init__(self, nvml: Any, card: Any, label: str) -> None:
        self._nvml = nvml
        self._label = label
        self._count = 0
        self._last: int | None = None
        self._events = None
        try:
            if nvml.nvmlDeviceGetSupportedEventTypes(card) & nvml.nvmlEventTypeXidCriticalError:
                events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(card, nvml.nvmlEventTypeXidCriticalError, events)
                self._events = events
        except nvml.NVMLError:
            pass  # Not every driver and container has events.

    def update(self) -> None:
        """Take what has happened since the last look; doesn't wait."""
        if self._events is None:
            return
        for _ in range(MAX_EVENTS_PER_LOOK):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                return  # A timeout: nothing more. Or the card is gone, which its other answers tell.
            self._count += 1
            if event.eventData != self._last:
                logger.warning("GPU %s: XID error %d", self._label, event.eventData)
            self._last = event.eventData

    def samples(self) -> tuple[Sample, ...]:
        """How many, from 0, and the last one's code; nothing where they can't be heard of."""
        if self._events is None:
            return ()
        count = Sample("paceline_engine_gpu_xid_errors", self._count)
        return (count,) if self._last is None else (count, Sample("paceline_engine_gpu_last_xid", self._last))


class BandwidthMeter:
    """Memory traffic as a share of the peak, between looks (NVML's GPU performance monitoring, Hopper and later).

    gpu_instance: of the part of the card that is meant; None is all of it.
    """

    def __init__(self, nvml: Any, card: Any, gpu_instance: int | None) -> None:
        self._nvml = nvml
        self._ask = Supported(nvml)
        self._samples: list[Any] = []
        self._has_last = False
        self._take = partial(nvml.nvmlGpmSampleGet, card)
        if gpu_instance is not None:
            self._take = partial(nvml.nvmlGpmMigSampleGet, card, ctypes.c_uint(gpu_instance))
        try:
            if nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        except nvml.NVMLError:
            pass  # Older drivers and cards.

    def read(self) -> float | None:
        """0 to 1 since the last call; None at the first one, and where it can't be told. Raises DeviceLost."""
        if not self._samples:
            return None
        last, now = self._samples
        try:
            taken = self._ask(partial(self._take, now))
        except DeviceLost:
            self._has_last = False
            raise
        if taken is None:
            self._has_last = False
            return None
        had_last, self._has_last = self._has_last, True
        self._samples = [now, last]
        return self._between(last, now) if had_last else None

    def _between(self, first: Any, second: Any) -> float | None:
        nvml = self._nvml
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = 1
        query.sample1, query.sample2 = first, second
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        if self._ask(partial(nvml.nvmlGpmMetricsGet, query)) is None or query.metrics[0].nvmlReturn:
            return None
        return query.metrics[0].value / 100
