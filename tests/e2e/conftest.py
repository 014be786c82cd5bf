"""Engines that tests of several files use; makes the helper beside this file importable: tests have no packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hack"))

import pytest
from engine_process import EngineProcess, engine_process
from up_process import Up


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A fast simulated engine that no test may damage."""
    directory = tmp_path_factory.mktemp("engine")
    options = ("--device", "simulated", "--simulated-alpha-ms", "1", "--simulated-beta-ms", "0")
    with engine_process(directory, *options, "--max-model-len", "2048") as process:
        yield process


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[EngineProcess]:
    """An engine of its own for one test; a token takes 20 ms."""
    with engine_process(tmp_path, "--device", "simulated", "--simulated-alpha-ms", "20") as process:
        yield process


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts instances; whatever a failed test leaves running is ended."""
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(tmp_path / "state", "--port", "0", *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.wait_end()
