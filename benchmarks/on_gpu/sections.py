"""Sections by name; each imports what it needs when it runs, so that what is missing costs that section alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from on_gpu.device import Device
from on_gpu.run import Run

# Module and function of each.
_PLACES = {
    "correctness": ("correctness", "check_all"),
    "attention": ("attention", "speed"),
    "kernels": ("kernels", "speed"),
    "engine": ("engine", "speed"),
    "transformers": ("peer", "speed"),
    "tuning": ("attention", "tune"),
}


def run(name: str, run: Run, device: Device) -> None:
    """Do one section."""
    module, function = _PLACES[name]
    work: Callable[[Run, Device], None] = getattr(import_module(f"on_gpu.{module}"), function)
    work(run, device)
