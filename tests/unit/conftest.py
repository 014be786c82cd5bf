"""A real S3 server for whoever needs one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hack"))

from seaweedfs import make_bucket, serve


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SeaweedFS with its S3 gateway; the identities "key" may do everything, "readkey" may read."""
    with serve(tmp_path_factory.mktemp("weed")) as url:
        yield url


@pytest.fixture
def bucket(s3_url: str) -> str:
    """A bucket on that server that takes objects."""
    return make_bucket(s3_url)
