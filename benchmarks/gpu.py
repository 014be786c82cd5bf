"""Everything about the GPU path that only a GPU can show, in one run of at most eight minutes on an H200.

Needs torch, triton, transformers and this repository. Sections, in order:

    correctness   every kernel beside its reference: the unit tests' cases, then as much of the full matrix as fits
    attention     attention at serving shapes: share of the bandwidth and of the bf16 peak, beside torch's own
    kernels       the other kernels at Llama 3.1 8B's shapes, beside torch and cuBLAS
    engine        Qwen3-0.6B's and Llama 3.1 8B's shapes with random weights through the engine
    transformers  transformers' own continuous batching on the same, as a ratio
    tuning        the two attention targets over several tilings

Results are written after every case: JSON, and a table beside it. What there was no time for is listed as not run.
Exit codes: 0 done, 1 something was wrong or failed, 2 it can't run here, 130 interrupted.

Examples:
    python benchmarks/gpu.py                          # all of it -> benchmarks/results/gpu.json
    python benchmarks/gpu.py --only attention tuning  # two sections
    python benchmarks/gpu.py --budget-s 240 --out /tmp/gpu.json
    python benchmarks/gpu.py --dry-run                # tiny shapes on the CPU: shows that all of it runs
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from on_gpu.device import Device
    from on_gpu.run import Run

ROOT = Path(__file__).resolve().parent.parent
# The most seconds of each section, and those below which it isn't worth a start.
SECTIONS = {
    "correctness": (100, 30),
    "attention": (60, 20),
    "kernels": (80, 20),
    "engine": (90, 45),
    "transformers": (75, 40),
    "tuning": (75, 15),
}
BUDGET_S, DRY_BUDGET_S = 450, 1800


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument(
        "--budget-s", type=float, help=f"seconds for all of it (default {BUDGET_S}; dry {DRY_BUDGET_S})"
    )
    parser.add_argument("--out", type=Path, help="the JSON to write (default benchmarks/results/gpu.json)")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, through Triton's interpreter")
    chosen = parser.parse_args()
    if chosen.budget_s is None:
        chosen.budget_s = DRY_BUDGET_S if chosen.dry_run else BUDGET_S
    if chosen.budget_s <= 0:
        parser.error(f"--budget-s must be above 0 seconds, not {chosen.budget_s:g}")
    if chosen.out is not None and chosen.out.suffix != ".json":
        parser.error(f"--out is the JSON to write and must end in .json, not {chosen.out.name!r}")
    return chosen


def prepare(*, is_dry: bool) -> None:
    """Before triton and the engine are imported."""
    for parent in ("operator", "engine", "kvstore"):
        sys.path.insert(0, str(ROOT / parent))
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"


def refusal(reason: str) -> int:
    sys.stderr.write(f"gpu.py: {reason}\n")
    return 2


def main() -> int:
    chosen = arguments()
    prepare(is_dry=chosen.dry_run)
    import torch

    if not chosen.dry_run and os.environ.get("TRITON_INTERPRET") == "1":
        return refusal("TRITON_INTERPRET=1 runs kernels on the CPU; unset it, or ask for --dry-run")
    if not chosen.dry_run and not torch.cuda.is_available():
        return refusal("torch sees no CUDA device; run it on a machine with one, or ask for --dry-run")
    from on_gpu.device import Device
    from on_gpu.run import Run

    default = ROOT / ".build" / "gpu-dry-run.json" if chosen.dry_run else ROOT / "benchmarks" / "results" / "gpu.json"
    run = Run(chosen.out or default, budget_s=chosen.budget_s, is_dry=chosen.dry_run)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        device = Device(is_dry=chosen.dry_run)
        run.is_alive = device.is_alive
        measure(run, device, chosen.only)
    except KeyboardInterrupt:
        run.say("interrupted; what was done is written")
        return 130
    finally:
        run.summarize()
    return 1 if run.has_failed else 0


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """What ends a process that runs past its limit is as Ctrl-C."""
    raise KeyboardInterrupt


def measure(run: Run, device: Device, names: list[str]) -> None:
    """The device's limits, then the sections that were asked for."""
    from on_gpu import sections
    from report import Row

    run.report.more["device"] = device.facts()
    limits, state = device.measure_limits()
    run.report.more["state"] = {"after a large product": state}
    run.add(
        Row("limit: copy", "bandwidth", "TB/s", round(limits.bandwidth / 1e12, 4)),
        Row("limit: bf16 product of 8192", "bf16 products", "TFLOP/s", round(limits.flops / 1e12, 4)),
    )
    for name, (most_s, least_s) in SECTIONS.items():
        if name in names:
            # A CPU may be as slow as it is: only the whole run's budget ends a section there.
            seconds = {"least_s": 0, "most_s": math.inf} if device.is_dry else {"least_s": least_s, "most_s": most_s}
            run.section(name, partial(sections.run, name, run, device), **seconds)
            run.report.more["state"][f"after {name}"] = device.state()
    run.write()


if __name__ == "__main__":
    sys.exit(main())
