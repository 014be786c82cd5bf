"""The house: which rooms exist and what must never stand in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE_PARENTS = ("operator", "engine", "kvstore")


def test_operator_folder_does_not_shadow_the_standard_library() -> None:
    code = "import operator, collections; assert 'attrgetter' in dir(operator), operator.__file__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_package_parents_hold_only_our_packages() -> None:
    for parent in PACKAGE_PARENTS:
        strangers = [
            path.name
            for path in (ROOT / parent).iterdir()
            if not path.name.startswith("paceline_") and path.name != "__pycache__"
        ]
        assert strangers == [], f"{parent}/ holds importable names that are not ours: {strangers}"


def test_tests_are_not_packages() -> None:
    # With an __init__.py, tests/unit/operator would be imported as `operator`.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_package_says_what_it_is_for() -> None:
    for parent in PACKAGE_PARENTS:
        for init in (ROOT / parent).rglob("__init__.py"):
            text = init.read_text().lstrip()
            assert text.startswith('"""') and len(text) > 20, f"{init.relative_to(ROOT)} has no docstring"


def test_importing_the_control_plane_loads_no_torch() -> None:
    code = (
        "import sys, paceline_operator.cli, paceline_router.cli, paceline_cli.main;"
        "heavy = {'torch', 'triton', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
