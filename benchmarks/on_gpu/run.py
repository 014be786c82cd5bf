"""One run of the script: sections within a budget of time, a line of progress a case, results on disk after each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from on_gpu import targets
from report import Report, Row

MAX_FAILED = 50
_MESSAGE_CHARACTERS = 400
_OURS = ("paceline_", "on_gpu")
_Case = TypeVar("_Case")


@dataclass
class Section:
    """What became of a section. status: "running", "done", "failed", "interrupted" or "not run".

    failed: the first MAX_FAILED cases that went wrong, of num_failed. not_run: cases for which there was no time.
    """

    name: str
    status: str = "running"
    seconds: float = 0.0
    num_done: int = 0
    num_failed: int = 0
    not_run: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    reason: str = ""


class Run:
    """Rows, targets and sections so far. is_dry: tiny shapes on the CPU, whose times mean nothing.

    budget_s: seconds from now until the last section must end.
    """

    def __init__(
        self, path: Path, *, budget_s: float, is_dry: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_dry = is_dry
        self.report = Report("gpu")
        self.sections: list[Section] = []
        self.measured: dict[str, float] = {}
        self.is_alive: Callable[[], bool] = lambda: True
        self._path = path
        self._clock = clock
        self._end = clock() + budget_s
        self._deadline = self._end
        self._current: Section | None = None

    @property
    def seconds_left(self) -> float:
        """Until the current section must end."""
        return self._deadline - self._clock()

    @property
    def has_failed(self) -> bool:
        """Whether any case or section did."""
        return any(section.failed or section.status in ("failed", "interrupted") for section in self.sections)

    def say(self, text: str) -> None:
        """A line of progress."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def add(self, *rows: Row) -> None:
        """Results, which are on disk when this returns."""
        self.report.rows += rows
        self.write()

    def write(self) -> Path:
        """The JSON and its table as they are now."""
        reason = "a dry run measures nothing" if self.is_dry else "its section wasn't run to the end"
        self.report.bars = targets.bars({} if self.is_dry else self.measured, reason)
        self.report.more |= {"dry_run": self.is_dry, "sections": [asdict(section) for section in self.sections]}
        return self.report.write(self._path)

    def summarize(self) -> None:
        """Write, and say in few lines what came out."""
        path = self.write()
        for section in self.sections:
            counts = f"{section.num_done} done, {section.num_failed} failed, {len(section.not_run)} not run"
            reason = f"; {section.reason}" if section.reason else ""
            self.say(f"{section.name}: {section.status} in {section.seconds:g} s; {counts}{reason}")
        for bar in self.report.bars:
            value = bar.reason if bar.value is None else f"{bar.value:.4g}"
            self.say(f"{bar.name}: {value} (target {bar.op} {bar.bound:g})")
        self.say(f"all results: {path} and {path.with_suffix('.md').name}")

    def section(self, name: str, work: Callable[[], None], *, least_s: float, most_s: float) -> None:
        """Do `work` if `least_s` seconds are left, and tell it to end after `most_s`."""
        left = self._end - self._clock()
        if left < least_s or not self.is_alive():
            reason = f"{left:.0f} s are left and it needs {least_s:.0f}" if left < least_s else "the device is lost"
            self.sections.append(Section(name, "not run", reason=reason))
            self.say(f"[{name}] not run: {reason}")
            self.write()
            return
        section = self._current = Section(name)
        self.sections.append(section)
        begin = self._clock()
        self._deadline = min(self._end, begin + most_s)
        try:
            work()
            section.status = "done"
        except KeyboardInterrupt:
            section.status = "interrupted"
            raise
        except ModuleNotFoundError as error:
            is_ours = (error.name or "").startswith(_OURS)
            section.status, section.reason = "failed" if is_ours else "not run", f"needs {error.name}, which isn't here"
        except Exception as error:
            section.status, section.reason = "failed", _one_line(error)
        finally:
            section.seconds = round(self._clock() - begin, 1)
            self._deadline, self._current = self._end, None
            if section.status != "done":
                self.say(f"[{name}] {section.status}: {section.reason}")
            self.write()

    def cases(self, cases: Iterable[tuple[str, _Case]]) -> Iterator[tuple[str, _Case]]:
        """The named cases for which there is time, with a line of progress each; the others are noted as not run."""
        listed = list(cases)
        section = self._section()
        for number, (name, case) in enumerate(listed, 1):
            if self.seconds_left <= 0.0 or not self.is_alive():
                section.not_run += [name for name, _ in listed[number - 1 :]]
                section.reason = "out of time" if self.is_alive() else "the device is lost"
                return
            self.say(f"[{section.name} {number}/{len(listed)}] {name}")
            yield name, case

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case, whose failure is noted and ends nothing else."""
        section = self._section()
        try:
            yield
            section.num_done += 1
        except Exception as error:
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """Note that a case went wrong."""
        section = self._section()
        section.num_failed += 1
        if len(section.failed) < MAX_FAILED:
            section.failed.append(f"{name}: {_one_line(error)}")
            self.say(f"FAILED {section.failed[-1]}")
            self.write()

    def count(self, num_done: int, total: int) -> None:
        """For a section that counts its cases itself."""
        section = self._section()
        section.num_done = num_done
        section.reason = f"{num_done} right and {section.num_failed} wrong of {total} cases"

    def _section(self) -> Section:
        assert self._current is not None
        return self._current


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."
