"""What the repository says about itself is so: links lead somewhere, images install what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
IMAGES = sorted((ROOT / "manifests" / "images").glob("*.Dockerfile"))
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if not link.startswith(("http", "mailto:"))]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_images_copy_and_install_what_exists(image: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = image.read_text()
    for extras in re.findall(r'"\.\[([a-z,]+)\]"', text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (entry,) = re.findall(r'ENTRYPOINT \["([a-z-]+)"\]', text)
    assert entry in project["scripts"]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert set(sources.split()) <= allowed
        assert all((ROOT / source).exists() for source in sources.split())


def test_the_engine_image_has_the_compiler_that_a_gpu_needs() -> None:
    """Triton builds its launcher in the pod; what an earlier stage of the image had is gone then."""
    last = (ROOT / "manifests" / "images" / "engine.Dockerfile").read_text().rpartition("\nFROM ")[2]
    (packages,) = re.findall(r"apt-get install ((?:\S+ )+?)&&", last)
    assert {"gcc", "libc6-dev"} <= set(packages.split())


def test_every_make_target_in_the_pages_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z][a-z0-9-]*)", page.read_text())}
    assert named <= targets
