"""Every kernel beside its reference: the cases of the unit tests, then as much of the full matrix as there is time for.

Cases that differ in their first parameter alone share their compiled kernels, so they go together. Processes work side
by side, since compiling takes most of the time; one that loses its GPU context is replaced.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import random
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from on_gpu.device import Device
from on_gpu.run import Run
from report import Row

CASES = Path(__file__).parents[2] / "tests" / "unit" / "engine" / "kernels"
KERNELS = ("attention", "rope_kv_write", "rms_norm", "gated_mlp", "block_copy", "quantized_gemm", "lora")
KERNELS += ("cuts", "rules", "sampling", "rejection", "logprobs")
TOGETHER = 4
CASES_A_LINE = 500
SEED = 0

Case = dict[str, Any]
# Exit code of a process whose GPU context is lost; a case that it has told of is to blame.
LOST = 3
# A kernel and cases of it that go to one process together.
Chunk = tuple[str, list[Case]]


def module_of(kernel: str) -> Any:
    """The kernel's cases and check."""
    if str(CASES) not in sys.path:
        sys.path.insert(0, str(CASES))
    return importlib.import_module(f"{kernel}_cases")


def first_chunks(kernel: str) -> list[Chunk]:
    """The unit tests' cases, and those at real lengths and vocabularies that the interpreter is too slow for."""
    cases = module_of(kernel)
    listed = list(getattr(cases, "CASES", ()))
    if hasattr(cases, "PARAMETERS"):
        listed += importlib.import_module("pairwise").pairwise(cases.PARAMETERS)
    if kernel == "attention":
        varied = itertools.product(cases.PARAMETERS["dtype"], cases.PARAMETERS["kv"], cases.PARAMETERS["num_segments"])
        for dtype, kv, segments in varied:
            long = {"batch": "long", "heads": (32, 8), "head_dim": 128, "num_segments": 8 * segments}
            listed.append({**cases.PLAIN, **long, "dtype": dtype, "kv": kv})
    if kernel in ("rules", "sampling", "logprobs"):
        listed += [{**case, "vocab_size": 151_936} for case in cases.CASES[:2]]
    return [(kernel, listed[begin : begin + TOGETHER]) for begin in range(0, len(listed), TOGETHER)]


def example(kernel: str) -> Chunk:
    """One of the unit tests' cases, a small one."""
    cases = module_of(kernel)
    return (kernel, cases.CASES[-1:] if hasattr(cases, "CASES") else first_chunks(kernel)[0][1][:1])


def matrix_chunks(kernel: str) -> list[Chunk]:
    """Every combination of the kernel's parameters."""
    cases = module_of(kernel)
    if not hasattr(cases, "PARAMETERS"):
        return []
    (first, values), *others = cases.PARAMETERS.items()
    names = [name for name, _ in others]
    rests = itertools.product(*(choices for _, choices in others))
    return [(kernel, [{first: value, **dict(zip(names, rest, strict=True))} for value in values]) for rest in rests]


@dataclass
class Tally:
    """Cases by kernel: all there are, those that were right, and the largest error over its tolerance."""

    total: Counter[str] = field(default_factory=Counter[str])
    right: Counter[str] = field(default_factory=Counter[str])
    wrong: Counter[str] = field(default_factory=Counter[str])
    worst: dict[str, float] = field(default_factory=dict)

    def note(self, kernel: str, error: float | None) -> None:
        """A case's error, None where it failed."""
        if error is None:
            self.wrong[kernel] += 1
            return
        self.right[kernel] += 1
        self.worst[kernel] = max(self.worst.get(kernel, 0.0), error)

    def rows(self) -> list[Row]:
        """How much of each kernel's matrix was checked."""
        rows: list[Row] = []
        for kernel, total in self.total.items():
            rows.append(Row(f"correct, {kernel}", "cases", "cases", self.right[kernel], total, "full matrix"))
            if self.wrong[kernel]:
                rows.append(Row(f"wrong, {kernel}", "cases", "cases", self.wrong[kernel], total, "full matrix"))
            rows.append(Row(f"correct, {kernel}", "largest error", "of its tolerance", self.worst.get(kernel)))
        return rows


def check_chunk(chunk: Chunk, device: torch.device, tell: Callable[[float | str], None]) -> None:
    """Tell of each case its error, or what went wrong."""
    kernel, cases = chunk
    check = module_of(kernel).check
    for case in cases:
        try:
            with torch.device(device), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                told = check(case)
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        tell(told)


def work(connection: Connection, device: str) -> None:
    """A process that checks chunks until it is ended, or its GPU context is lost."""
    torch.set_num_threads(1)

    def tell(outcome: float | str) -> None:
        connection.send(outcome)
        try:
            if device != "cpu":
                torch.cuda.synchronize()
        except RuntimeError:
            os._exit(LOST)

    while True:
        check_chunk(connection.recv(), torch.device(device), tell)
        connection.send(None)


class Workers:
    """Processes that check chunks, each with one at a time."""

    def __init__(self, count: int, device: str, told: Callable[[Chunk, int, float | str], None]) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._device, self._told = device, told
        self._busy: dict[Connection, tuple[Any, Chunk, int]] = {}
        self._idle: list[tuple[Connection, Any]] = [self._start() for _ in range(count)]
        self._spare = 2 * count  # A GPU that loses every context is given up.

    def _start(self) -> tuple[Connection, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, self._device), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def check(self, chunks: Iterable[Chunk], is_time_left: Callable[[], bool]) -> None:
        """All chunks for which there is time."""
        left = deque(chunks)
        while (left or self._busy) and (self._idle or self._busy) and is_time_left():
            while left and self._idle:
                connection, process = self._idle.pop()
                chunk = left.popleft()
                connection.send(chunk)
                self._busy[connection] = process, chunk, 0
            for connection in wait(list(self._busy), timeout=0.2):
                assert isinstance(connection, Connection)
                self._hear(connection, left)

    def _hear(self, connection: Connection, left: deque[Chunk]) -> None:
        process, chunk, number = self._busy.pop(connection)
        try:
            told = connection.recv()
        except EOFError:
            process.join()
            if process.exitcode != LOST:
                self._told(chunk, number, f"the process that checked it ended with exit code {process.exitcode}")
                number += 1
            if chunk[1][number:]:
                left.append((chunk[0], chunk[1][number:]))
            if self._spare > 0:
                self._spare -= 1
                self._idle.append(self._start())
            return
        if told is None:
            self._idle.append((connection, process))
            return
        self._told(chunk, number, told)
        self._busy[connection] = process, chunk, number + 1

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in [process for _, process in self._idle] + [process for process, _, _ in self._busy.values()]:
            process.terminate()
            process.join()


def check_all(run: Run, device: Device) -> None:
    """The unit tests' cases of every kernel, then the matrix in random order; in a dry run one case a kernel."""
    tally = Tally()

    def told(chunk: Chunk, number: int, outcome: float | str) -> None:
        tally.note(chunk[0], None if isinstance(outcome, str) else outcome)
        if isinstance(outcome, str):
            run.fail(f"{chunk[0]} {chunk[1][number]}", AssertionError(outcome))
        elif (done := sum(tally.right.values())) % CASES_A_LINE == 0:
            run.say(f"[correctness {done}/{sum(tally.total.values())}]")

    first = [chunk for kernel in KERNELS for chunk in first_chunks(kernel)]
    matrix = [chunk for kernel in KERNELS for chunk in matrix_chunks(kernel)]
    random.Random(SEED).shuffle(matrix)
    for kernel, cases in first + matrix:
        tally.total[kernel] += len(cases)
    try:
        if device.is_dry:
            for kernel, _ in run.cases((kernel, kernel) for kernel in KERNELS):
                chunk = example(kernel)
                check_chunk(chunk, device.torch, partial(told, chunk, 0))
        else:
            side_by_side(run, device, first + matrix, told)
    finally:
        run.count(sum(tally.right.values()), sum(tally.total.values()))
        run.add(*tally.rows())


def side_by_side(
    run: Run, device: Device, chunks: Sequence[Chunk], told: Callable[[Chunk, int, float | str], None]
) -> None:
    """As many of the chunks as there is time for, on most of the machine's cores."""
    count = max(1, (os.cpu_count() or 2) - 2)
    run.say(f"[correctness] {sum(len(cases) for _, cases in chunks)} cases in {count} processes")
    workers = Workers(count, str(device.torch), told)
    try:
        workers.check(chunks, lambda: run.seconds_left > 0.0)
    finally:
        workers.close()
