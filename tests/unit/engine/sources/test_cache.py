"""The bounded cache of models: what goes first, what never goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_engine.models import cache

HOLDER = """
import sys
from pathlib import Path
from paceline_engine.models import cache
cache.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache of four entries of 1,000 bytes, the first one longest unused."""
    cache.mark(tmp_path)
    for age, name in enumerate(("models/a", "hub/models--org--b", "s3/c", "models/d")):
        entry = tmp_path / name
        (entry / "deep").mkdir(parents=True)
        (entry / "deep" / "weights").write_bytes(b"x" * 1000)
        use = entry.parent / f"{entry.name}.use"
        use.touch()
        os.utime(use, (1000 + age, 1000 + age))
    return tmp_path


def names(root: Path) -> list[str]:
    return sorted(path.parent.parent.name for path in root.rglob("weights"))


def test_the_longest_unused_go_until_the_rest_fits(root: Path) -> None:
    assert cache.trim(root, 4000) == []
    assert [path.name for path in cache.trim(root, 2500)] == ["a", "models--org--b"]
    assert names(root) == ["c", "d"]


def test_what_a_living_process_uses_stays(root: Path) -> None:
    held = root / "models" / "a" / "deep" / "weights"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        cache.trim(root, 0)
        assert names(root) == ["a"]
        holder.kill()
        holder.communicate()
    cache.trim(root, 0)
    assert names(root) == []


def test_using_an_entry_makes_it_the_newest(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from paceline_engine.models import cache; cache.hold(Path(sys.argv[1]))"
    )
    # -X dev: Python would complain of a lock that it had to close itself.
    command = [sys.executable, "-X", "dev", "-c", code, str(root / "models" / "a")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""
    assert [path.name for path in cache.trim(root, 3000)] == ["models--org--b"]


def test_a_folder_that_only_looks_like_a_cache_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    cache.hold(folder)
    assert list(tmp_path.rglob("*.use")) == []
