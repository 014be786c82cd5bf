"""Records without msgspec mean what they mean with it, and the engine core runs where a GPU image has no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline_engine import records
from paceline_engine.records import PlainStruct, replace_plain, require_msgspec

BASES = pytest.mark.parametrize(
    ("base", "replace"), [(msgspec.Struct, msgspec.structs.replace), (PlainStruct, replace_plain)]
)


def make(base: Any) -> tuple[Any, Any, Any]:
    class Point(base, frozen=True, kw_only=True, gc=False, tag="point"):
        x: int
        y: int = 0
        names: tuple[str, ...] = ()

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x must not be negative")

        @property
        def total(self) -> int:
            return self.x + self.y

    class Pair(base, frozen=True, array_like=True):
        first: int
        second: int = 2

    class Log(base, kw_only=True):
        entries: list[int] = []  # noqa: RUF012
        counts: dict[str, int] = {}  # noqa: RUF012

    return Point, Pair, Log


@BASES
def test_fields_by_name_and_by_place(base, replace):
    point, pair, _ = make(base)
    made = point(x=1, names=("a",))
    assert (made.x, made.y, made.names, made.total) == (1, 0, ("a",), 1)
    assert (pair(5).first, pair(5).second) == (5, 2)
    for wrong in (lambda: point(1), lambda: point(y=1), lambda: point(x=1, z=2)):
        with pytest.raises(TypeError):
            wrong()


@BASES
def test_equal_fields_are_equal_records_with_equal_hashes(base, replace):
    point, pair, log = make(base)
    assert point(x=1) == point(x=1, y=0) != point(x=2)
    assert {point(x=1): "a"}[point(x=1)] == "a"
    assert pair(1) != point(x=1)
    with pytest.raises(TypeError):
        hash(log())


@BASES
def test_copies_with_other_values_are_checked_as_new_ones(base, replace):
    point, _, _ = make(base)
    made = point(x=1, y=2)
    assert (replace(made, x=5), made) == (point(x=5, y=2), point(x=1, y=2))
    with pytest.raises(TypeError):
        replace(made, z=1)
    with pytest.raises(ValueError, match="x must not be negative"):
        replace(made, x=-1)
    with pytest.raises(ValueError, match="x must not be negative"):
        point(x=-1)


@BASES
def test_each_record_has_an_empty_list_of_its_own(base, replace):
    log = make(base)[2]
    log().entries.append(1)
    log().counts["a"] = 1
    assert (log().entries, log().counts) == ([], {})


def test_what_needs_msgspec_says_so_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(
        RuntimeError, match=r"^a step log needs the package msgspec, which isn't installed: install it$"
    ):
        require_msgspec("a step log")


def test_records_are_structs_where_msgspec_is_installed():
    assert records.Struct is msgspec.Struct


def test_the_engine_core_runs_without_packages_that_a_gpu_image_lacks(tmp_path):
    def run(*options: str) -> dict[str, list[int]]:
        command = [sys.executable, str(Path(__file__).with_name("device_image.py")), str(tmp_path), *options]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    without, with_all = run(), run("--all-packages")
    assert without == with_all
    assert {name: len(tokens) for name, tokens in without.items()} == {"0": 6, "1": 6, "2": 6}
