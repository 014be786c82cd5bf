"""Every kernel compiles for cards that aren't here, within their limits, to what the committed page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.timeout(900)
def test_every_launch_compiles_for_both_cards_to_what_the_page_says():
    # The interpreter, which the other tests here use, stands in for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "hack" / "kernels.py"), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
