"""How many threads torch gets on a CPU, and how they wait. Imports no torch: the environment must be set first."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def num_threads(cpu_max: Path = CGROUP_CPU_MAX) -> int:
    """Threads worth starting: the CPUs this process may run on, less if its cgroup's quota is smaller.

    More threads than quota would be throttled in the middle of a step, with the others waiting.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(available, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # No cgroup v2 here, or no quota ("max").
        return available


def prepare_environment() -> None:
    """Have idle OpenMP threads sleep instead of spin, unless the user chose; has effect before torch is first imported.

    A decode step has hundreds of short parallel regions. When other processes want the CPUs, as the router and other
    engines on a laptop do, spinning threads burn the time slices that the thread they wait for needs: on two busy cores
    a spinning engine was over ten times slower. On idle CPUs sleeping costs about a third of the speed of a small
    model's decode; where an engine has its CPUs to itself, set OMP_WAIT_POLICY=ACTIVE.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
