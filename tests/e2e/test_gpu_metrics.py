"""The engine's processes where the device says that it is a GPU: its core tells which, and /metrics asks the driver.

There is no GPU here. The simulated device claims one, and the driver's library is a test's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engine_process import HTTP, engine_process, wait_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "engine" / "telemetry"))

from fake_nvml import build

from paceline_engine.native.build import find_compiler

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.native,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here"),
]

# Python runs it first in each of the engine's processes.
CLAIM = """
import ctypes
ctypes.CDLL({library!r}).fake_reset(3)
from paceline_engine.backends.simulated import SimulatedBackend
SimulatedBackend.gpus = (1,)
SimulatedBackend.stats = property(lambda self: {{"sampled_steps": 3.0, "device_seconds": 0.5}})
"""


def test_metrics_are_of_the_gpu_that_the_core_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler()
    assert compiler is not None
    (tmp_path / "sitecustomize.py").write_text(CLAIM.format(library=str(build(compiler, tmp_path))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    with engine_process(tmp_path, "--device", "simulated") as engine:

        def lines() -> list[str]:
            return HTTP.get(f"{engine.metrics}/metrics").text.splitlines()

        # The core's counters come with its next step or heartbeat.
        wait_for("counters", lambda: 'paceline_engine_gpu_sampled_steps_total{model_name="m"} 3.0' in lines())
        scrape = lines()
        assert 'paceline_engine_gpu_step_seconds_total{model_name="m"} 0.5' in scrape
        assert 'paceline_engine_gpu_up{gpu="2",model_name="m"} 1.0' in scrape
        assert 'paceline_engine_gpu_power_watts{gpu="2",model_name="m"} 412.5' in scrape
        assert not [line for line in scrape if 'gpu="0"' in line or 'gpu="1"' in line]
