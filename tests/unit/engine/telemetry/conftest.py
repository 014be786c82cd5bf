"""A machine with GPUs, as far as NVML tells: the real bindings over a library that tests describe and break."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # Test folders are no packages.

from fake_nvml import FakeNvml, build

from paceline_engine.native.build import find_compiler


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built library."""
    compiler = find_compiler()
    assert compiler is not None
    return build(compiler, tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A machine with one card."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml(nvml_library)
    nvml.has_cards(1)
    return nvml
