"""A real S3 server for whoever needs one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hack"))

from seaweedfs import serve


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SeaweedFS with its S3 gateway; the identities "key" may do everything, "readkey" may read."""
    with serve(tmp_path_factory.mktemp("weed")) as url:
        yield url


@pytest.fixture
def bucket(s3_url: str) -> str:
    """A bucket on that server that takes objects."""
    import boto3
    from botocore.config import Config

    name = f"b-{os.urandom(6).hex()}"
    client = boto3.client(
        "s3",
        endpoint_url=s3_url,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 40, "mode": "standard"}, connect_timeout=5, read_timeout=20),
    )
    client.create_bucket(Bucket=name)
    client.put_object(Bucket=name, Key="ready", Body=b"")
    client.close()
    return name
