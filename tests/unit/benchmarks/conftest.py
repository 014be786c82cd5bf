"""Benchmarks are scripts, so their folder is made importable; kernels in them run through Triton's interpreter here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
