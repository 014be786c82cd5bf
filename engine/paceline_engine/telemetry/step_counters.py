"""Names of the counters with which a GPU backend's `stats` tell sampled times, and the metrics that show them.

Shared by the core process, which counts, and the API process, which exposes; so imports nothing.
"""

from __future__ import annotations

SAMPLED_STEPS = "sampled_steps"
STEP_SECONDS = "device_seconds"
SAMPLED_GAPS = "sampled_gaps"
GAP_SECONDS = "gap_seconds"
SAMPLED_COLLECTIVES = "sampled_collectives"
COLLECTIVE_SECONDS = "collective_seconds"
# Between a counter's name and the process group that it is of.
GROUP_SEPARATOR = ":"

BY_COUNTER = {
    SAMPLED_STEPS: "paceline_engine_gpu_sampled_steps",
    STEP_SECONDS: "paceline_engine_gpu_step_seconds",
    SAMPLED_GAPS: "paceline_engine_gpu_sampled_gaps",
    GAP_SECONDS: "paceline_engine_gpu_gap_seconds",
}
BY_GROUP_COUNTER = {
    SAMPLED_COLLECTIVES: "paceline_engine_gpu_sampled_collectives",
    COLLECTIVE_SECONDS: "paceline_engine_gpu_collective_seconds",
}


def of_group(counter: str, group: str) -> str:
    """The name of a counter of one process group."""
    return f"{counter}{GROUP_SEPARATOR}{group}"
