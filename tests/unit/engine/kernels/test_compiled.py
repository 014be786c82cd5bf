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


def test_steps_of_any_size_run_the_same_kernels():
    """Or streams would wait for the compiler whenever a number of tokens, sequences or blocks is 1 or divides by 16."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("count_variants.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert {"paged_attention_kernel", "rope_kv_write_kernel", "rms_norm_kernel", "shrink_kernel"} <= counts.keys()
    assert {name for name, count in counts.items() if count != "1"} == set()
