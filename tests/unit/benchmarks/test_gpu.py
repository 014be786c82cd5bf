"""The GPU benchmark as it is run, on the CPU in small; and the processes that check kernels side by side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
SECTIONS = ("correctness", "attention", "kernels", "engine", "transformers", "tuning")
# A process imports torch, and some of them transformers: much on a busy machine.
pytestmark = pytest.mark.timeout(600)


def command(*options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *options]


def test_a_dry_run_runs_every_section_and_measures_nothing(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        command("--dry-run", "--out", str(out)), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(out.read_text())
    assert document["dry_run"] is True
    assert [section["name"] for section in document["sections"]] == list(SECTIONS)
    for section in document["sections"]:
        assert (section["status"], section["num_failed"], section["not_run"]) == ("done", 0, [])
        assert section["num_done"] > 0
    assert [bar["value"] for bar in document["bars"]] == [None] * 4
    peers = {row["peer_name"] for row in document["rows"]}
    assert not {"datasheet", "measured here"} & peers
    assert out.with_suffix(".md").read_text().startswith("# gpu")


def test_an_interrupted_run_keeps_what_was_done(tmp_path):
    out = tmp_path / "gpu.json"
    process = subprocess.Popen(
        command("--dry-run", "--only", "kernels", "--out", str(out)), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[kernels 3/"):
            process.send_signal(signal.SIGTERM)
            break
    _, rest = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in rest
    document = json.loads(out.read_text())
    assert document["sections"][0]["status"] == "interrupted"
    assert document["sections"][0]["num_done"] >= 2
    assert any(row["case"].startswith("RMSNorm") for row in document["rows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget-s", "0"], "--budget-s must be above 0 seconds, not 0"),
        (["--out", "gpu.txt"], "--out is the JSON to write and must end in .json, not 'gpu.txt'"),
        (["--only", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_bad_options_are_refused_in_a_line(options, message):
    done = subprocess.run(command(*options), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_without_a_device_it_says_what_to_do():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command(), capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (
        2,
        "gpu.py: torch sees no CUDA device; run it on a machine with one, or ask for --dry-run\n",
    )


CASES = """
import os, torch
def check(case):
    assert torch.ones(1).device.type == "cpu"
    if case == "die":
        os._exit(9)
    assert case != "wrong", "it is\\nwrong"
    return float(case)
"""


def test_a_process_that_dies_takes_its_case_with_it_and_no_other(tmp_path, monkeypatch):
    from on_gpu.correctness import Workers

    (tmp_path / "odd_cases.py").write_text(CASES)
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[tuple[str, float | str]] = []
    chunks: list[Any] = [("odd", ["0.1", "wrong", "0.2", "die", "0.3"]), ("odd", ["0.4"])]
    workers = Workers(1, "cpu", lambda chunk, number, outcome: told.append((chunk[1][number], outcome)))
    try:
        workers.check(chunks, lambda: True)
    finally:
        workers.close()
    assert dict(told) == {
        "0.1": 0.1,
        "wrong": "AssertionError: it is wrong",
        "0.2": 0.2,
        "die": "the process that checked it ended with exit code 9",
        "0.3": 0.3,
        "0.4": 0.4,
    }
    assert len(told) == 6


def test_a_kernel_that_is_wrong_is_found(monkeypatch):
    import torch
    from on_gpu.correctness import check_chunk, first_chunks, module_of

    cases = module_of("rms_norm")
    right = cases.rms_norm
    monkeypatch.setattr(cases, "rms_norm", lambda *args, **options: right(*args, **options) * 1.05)
    outcomes: list[float | str] = []
    check_chunk(("rms_norm", first_chunks("rms_norm")[0][1][:4]), torch.device("cpu"), outcomes.append)
    assert any(isinstance(outcome, str) and "not close" in outcome for outcome in outcomes)


def test_what_is_timed_is_checked_first():
    import torch
    from on_gpu.kernels import norm
    from on_gpu.work import Work, WrongResultError, check

    right = norm(3, 32, torch.device("cpu"))
    check(right)
    assert right.error is not None
    for error in (0.5, float("nan")):
        with pytest.raises(WrongResultError, match="relative error"):
            check(Work(run=right.run, num_bytes=1, error=lambda error=error: error))


def test_the_work_of_attention_is_counted():
    import torch
    from on_gpu.attention import Batch, Shape

    device = torch.device("cpu")
    prefill = Batch(Shape(sequences=[(4, 4)], heads=(2, 1), head_dim=16), device)
    assert prefill.num_flops() == 4 * 2 * 16 * (1 + 2 + 3 + 4)
    window = Batch(Shape(sequences=[(4, 4)], heads=(2, 1), head_dim=16, window=2), device)
    assert window.num_flops() == 4 * 2 * 16 * (1 + 2 + 2 + 2)
    decodes = Batch(Shape(sequences=[(1, 20), (1, 7)], heads=(2, 1), head_dim=16), device)
    assert decodes.num_bytes() == 2 * 27 * 16 * 2 + 2 * (2 * 2 * 16 * 2)
    eight_bits = Batch(Shape(sequences=[(1, 20)], heads=(2, 1), head_dim=16, kv=torch.int8), device)
    assert eight_bits.num_bytes() == 2 * 20 * (16 + 4) + 2 * (2 * 16 * 2)


def test_the_bytes_of_a_step_are_those_of_the_weights():
    from on_gpu.models import LLAMA_31_8B, QWEN3_06B, streamed_bytes

    # Parameters as the model cards have them, less what a step doesn't read: Llama's embedding.
    assert streamed_bytes(LLAMA_31_8B) == 2 * (8_030_261_248 - 128_256 * 4096)
    assert streamed_bytes(QWEN3_06B) == 2 * 596_049_920
