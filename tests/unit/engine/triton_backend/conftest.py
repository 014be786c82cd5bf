"""Kernels run through Triton's interpreter here, on the CPU; it is chosen when a kernel's module is imported.

Also makes helpers importable, of the kernels' and models' tests and beside this file: tests have no packages.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("kernels", "model")]
