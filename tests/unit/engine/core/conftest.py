"""Puts this folder on the path, so that the tests can import their driver; test folders are no packages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
