"""House numbers and habits that a linter does not know: lengths, clocks in pure cores, leftovers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("operator", "engine", "kvstore")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
PURE = (
    "operator/paceline_api",
    "operator/paceline_operator/planner",
    "operator/paceline_operator/workqueue.py",
    "operator/paceline_router/policy.py",
    "engine/paceline_engine/core",
    "kvstore/paceline_kvstore/policy",
)
CLOCKS_AND_DICE = {"time", "random", "secrets", "uuid", "datetime"}
IMPURE_CALLS = re.compile(r"\b(datetime\.now|datetime\.utcnow|time\.time|time\.monotonic|time\.sleep|uuid4)\(")


def python_files(*roots: str) -> Iterator[Path]:
    for root in roots:
        path = ROOT / root
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{name} has {lines} lines"
        for path in python_files(*SOURCES, "tests", "hack", "benchmarks")
        for name, lines in functions(path)
        if lines > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_files_are_short() -> None:
    long = [
        str(path.relative_to(ROOT))
        for path in python_files(*SOURCES, "tests", "hack", "benchmarks")
        if len(path.read_text().splitlines()) > FILE_LINES_MAX
    ]
    assert long == []


@pytest.mark.parametrize("root", PURE)
def test_pure_cores_have_no_clock_and_no_dice(root: str) -> None:
    for path in python_files(root):
        source = path.read_text()
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom) and not node.level
        }
        where = path.relative_to(ROOT)
        assert not imported & (CLOCKS_AND_DICE - {"datetime"}), f"{where}: pass times and random numbers in"
        assert not IMPURE_CALLS.search(source), f"{where}: pass times and random numbers in"


def test_no_bare_print_and_no_leftovers() -> None:
    for path in python_files(*SOURCES):
        text = path.read_text()
        where = path.relative_to(ROOT)
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), f"{where}: finish it or leave it out"
        assert not re.search(r"^\s*print\(", text, re.MULTILINE), f"{where}: log, or write to a stream"
        assert ast.get_docstring(ast.parse(text)), f"{where}: a module docstring says what and why"


def test_committed_text_names_no_machine() -> None:
    pattern = re.compile(r"/(?:work|root)/[a-z]|index-url|/simple[\"/]")
    others = [*ROOT.glob("*.txt"), *ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "Makefile"]
    for path in [*python_files(*SOURCES, "tests", "hack"), *others]:
        if path.name != "test_tidy.py" and path.exists():
            assert not pattern.search(path.read_text()), f"{path.relative_to(ROOT)} names a machine or a registry"
