"""What GPUs say through NVML, with NVIDIA's bindings over a library whose cards are the test's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeNvml

from paceline_engine.native.build import find_compiler
from paceline_engine.telemetry.nvml import open_gpus
from paceline_engine.telemetry.nvml_history import MAX_EVENTS_PER_LOOK
from paceline_engine.telemetry.reading import NoTelemetry, Reading

pytestmark = [pytest.mark.native, pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")]

UNKNOWN, NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST = 999, 3, 4, 13, 15


def values(reading: Reading) -> dict[str, float]:
    """By name without the prefix, a label behind a slash."""
    samples = (*reading.values, *reading.counts)
    names = [f"{sample.name}/{sample.label}" if sample.label else sample.name for sample in samples]
    assert len(set(names)) == len(names)
    return {
        name.removeprefix("paceline_engine_gpu_"): sample.value for name, sample in zip(names, samples, strict=True)
    }


def test_a_card_tells_everything_in_base_units(nvml: FakeNvml) -> None:
    reading = open_gpus([0]).read()[0]
    assert (reading.gpu, reading.name, reading.up) == ("0", "NVIDIA H200", True)
    assert reading.uuid == "GPU-000000a0-0000-0000-0000-000000000000"
    assert values(reading) == pytest.approx(
        {
            "busy_ratio": 0.87,
            "memory_busy_ratio": 0.42,
            "memory_used_bytes": 400,
            "memory_total_bytes": 1000,
            "power_watts": 412.5,
            "energy_joules": 1234.567,
            "temperature_celsius": 61,
            "sm_clock_hertz": 1.98e9,
            "memory_clock_hertz": 3.201e9,
            "pcie_replays": 5,
            "ecc_errors/corrected": 30,
            "ecc_errors/uncorrected": 2,
            "clock_limited/sw_power_cap": 1,
            "clock_limited/hw_slowdown": 0,
            "clock_limited/sync_boost": 0,
            "clock_limited/sw_thermal_slowdown": 0,
            "clock_limited/hw_thermal_slowdown": 1,
            "clock_limited/hw_power_brake_slowdown": 0,
            "xid_errors": 0,
        }
    )


def test_only_the_engines_own_cards_are_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.has_cards(4)
    assert [reading.gpu for reading in open_gpus([0, 1]).read()] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU")
    assert [reading.gpu for reading in open_gpus([0]).read()] == ["3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-000000a2,GPU-000000a1")
    assert [reading.gpu for reading in open_gpus([1]).read()] == ["1"]


def test_a_card_that_is_not_visible_is_warned_of(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    assert len(open_gpus([0, 1]).read()) == 1
    assert "1 of the engine's 2 GPUs" in caplog.text


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, UNKNOWN])
def test_what_a_card_does_not_tell_is_left_out(nvml: FakeNvml, code: int) -> None:
    reader = open_gpus([0])
    before = values(reader.read()[0])
    for function, missing in (
        ("nvmlDeviceGetPowerUsage", {"power_watts"}),
        ("nvmlDeviceGetUtilizationRates", {"busy_ratio", "memory_busy_ratio"}),
        ("nvmlDeviceGetTotalEccErrors", {"ecc_errors/corrected", "ecc_errors/uncorrected"}),
    ):
        nvml.fail(function, code)
        reading = reader.read()[0]
        assert reading.up and before.keys() - values(reading).keys() == missing
        nvml.fail(function, 0)


def test_older_drivers_are_asked_the_older_questions(nvml: FakeNvml) -> None:
    nvml.fail("nvmlDeviceGetMemoryInfo_v2", FUNCTION_NOT_FOUND)
    nvml.fail("nvmlDeviceGetCurrentClocksEventReasons", FUNCTION_NOT_FOUND)
    for function in ("nvmlDeviceGetMigMode", "nvmlDeviceGetSupportedEventTypes", "nvmlGpmQueryDeviceSupport"):
        nvml.fail(function, FUNCTION_NOT_FOUND)
    told = values(open_gpus([0]).read()[0])
    assert (told["memory_used_bytes"], told["clock_limited/hw_power_brake_slowdown"]) == (700, 1)
    assert "xid_errors" not in told


@pytest.mark.parametrize("code", [GPU_IS_LOST, UNKNOWN])
def test_a_card_that_falls_off_the_bus_is_down_and_the_others_are_not(
    nvml: FakeNvml, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.has_cards(2)
    reader = open_gpus([0, 1])
    nvml.xid(0, 79)
    nvml.fail("*", code, card=0)
    for _ in range(3):
        lost, well = reader.read()
    assert (lost.up, lost.values, lost.gpu) == (False, (), "0")
    assert values(lost) == {"xid_errors": 1, "last_xid": 79}
    assert well.up and values(well)["power_watts"] == 412.5
    assert caplog.text.count("GPU 0 (GPU-000000a0-0000-0000-0000-000000000000) is down") == 1
    nvml.fail("*", 0, card=0)
    assert reader.read()[0].up
    assert "answers again" in caplog.text


def test_one_answer_that_the_card_is_lost_is_enough(nvml: FakeNvml) -> None:
    reader = open_gpus([0])
    nvml.fail("nvmlDeviceGetPowerUsage", GPU_IS_LOST)
    assert (reader.read()[0].up, reader.read()[0].values) == (False, ())


def test_a_neighbour_that_is_lost_already_keeps_its_place(nvml: FakeNvml) -> None:
    nvml.has_cards(2)
    nvml.fail("nvmlDeviceGetHandleByIndex_v2", GPU_IS_LOST, card=0)
    assert [reading.gpu for reading in open_gpus([1]).read()] == ["1"]
    with pytest.raises(NoTelemetry, match="GPU is lost"):
        open_gpus([0])


def test_xid_errors_are_counted_from_zero_and_a_storm_takes_several_looks(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    reader = open_gpus([0])
    assert values(reader.read()[0])["xid_errors"] == 0
    for code in (31, 31, 94):
        nvml.xid(0, code)
    assert (values(reader.read()[0])["xid_errors"], values(reader.read()[0])["last_xid"]) == (3, 94)
    assert [record.getMessage() for record in caplog.records] == ["GPU 0: XID error 31", "GPU 0: XID error 94"]
    for code in range(MAX_EVENTS_PER_LOOK + 5):
        nvml.xid(0, code)
    assert values(reader.read()[0])["xid_errors"] == MAX_EVENTS_PER_LOOK + 3
    assert values(reader.read()[0])["xid_errors"] == MAX_EVENTS_PER_LOOK + 8


def test_bandwidth_is_told_between_two_looks(nvml: FakeNvml) -> None:
    nvml.has_performance_monitoring(0)
    reader = open_gpus([0])
    assert "memory_bandwidth_ratio" not in values(reader.read()[0])
    for _ in range(3):
        assert values(reader.read()[0])["memory_bandwidth_ratio"] == pytest.approx(0.635)
    nvml.fail("nvmlGpmSampleGet", UNKNOWN)
    assert "memory_bandwidth_ratio" not in values(reader.read()[0])
    nvml.fail("nvmlGpmSampleGet", 0)
    assert "memory_bandwidth_ratio" not in values(reader.read()[0])
    assert "memory_bandwidth_ratio" in values(reader.read()[0])


def test_a_part_of_a_card_has_its_own_memory_and_the_cards_power(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.partition(0, 3)
    nvml.has_performance_monitoring(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-000000b0-0000-0000-0000-000000000001")
    reader = open_gpus([0])
    reader.read()
    reading = reader.read()[0]
    told = values(reading)
    assert (reading.gpu, reading.uuid) == ("0:1", "MIG-000000b0-0000-0000-0000-000000000001")
    assert (told["memory_total_bytes"], told["power_watts"]) == (100, 412.5)
    assert "busy_ratio" not in told
    assert told["memory_bandwidth_ratio"] == pytest.approx(0.635)


def test_a_driver_that_is_not_loaded_is_one_line(nvml: FakeNvml) -> None:
    nvml.fail("nvmlInitWithFlags", 9)
    with pytest.raises(NoTelemetry, match="NVML says: Driver Not Loaded"):
        open_gpus([0])


def opened(folder: Path, prelude: str = "") -> str:
    """What a new process says that looks for libraries in `folder`."""
    code = (
        f"{prelude}\nfrom paceline_engine.telemetry.nvml import open_gpus\n"
        "from paceline_engine.telemetry.reading import NoTelemetry\n"
        "import sys; assert 'pynvml' not in sys.modules or sys.modules['pynvml'] is None\n"
        "try:\n    print([reading.gpu for reading in open_gpus([0]).read()])\n"
        "except NoTelemetry as error:\n    print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["LD_LIBRARY_PATH"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_without_the_library_or_the_bindings_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # Not a library: it hides one that this machine may have.
    assert opened(tmp_path) == "NVML says: NVML Shared Library Not Found"
    no_bindings = "import sys; sys.modules['pynvml'] = None"
    assert opened(tmp_path, no_bindings) == "the Python package nvidia-ml-py is not installed"
