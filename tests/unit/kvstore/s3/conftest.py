"""A bucket on a real S3 server, and tiers that use it, past a proxy or through it."""

from __future__ import annotations

import itertools
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from paceline_kvstore import ChunkKey
from paceline_kvstore.breaker import BreakerLimits
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.tiers.s3 import S3Tier

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Test folders are no packages.

from fault_proxy import FaultProxy

BUCKET = "kvstore"
# Breakers come back and retries follow within milliseconds, so that no test waits for them.
QUICK = BreakerLimits(least=3, open_seconds=0.01, open_seconds_max=0.02, probes=1)


@pytest.fixture(scope="session")
def client(s3_url: str) -> Any:
    """A plain client past the proxy, to look at what is really in the bucket and to damage it."""
    plain = boto3.client(
        "s3",
        endpoint_url=s3_url,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=20),
    )
    deadline = time.monotonic() + 60
    while True:  # The gateway listens a moment before its filer serves and volumes grow.
        try:
            plain.create_bucket(Bucket=BUCKET)
            plain.put_object(Bucket=BUCKET, Key="ready", Body=b"")
            return plain
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.fixture
def proxy(s3_url: str, client: Any) -> Iterator[FaultProxy]:
    proxy = FaultProxy(address(s3_url))
    yield proxy
    proxy.close()


@pytest.fixture
def secure(s3_url: str, client: Any, tmp_path: Path) -> Iterator[tuple[FaultProxy, Path]]:
    """A proxy that speaks HTTPS with a certificate of an authority that nobody knows, and that authority's file."""
    cert, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    proxy = FaultProxy(address(s3_url), tls=context)
    yield proxy, cert
    proxy.close()


class Bench:
    """A prefix of its own in the bucket, its keys, and tiers on it."""

    _numbers = itertools.count(1)

    def __init__(self, client: Any, url: str) -> None:
        self.client = client
        self.prefix = f"test/{next(self._numbers)}"
        self.settings: dict[str, Any] = {
            "bucket": BUCKET, "prefix": self.prefix, "endpoint": url, "region": "us-east-1", "access_key": "key",
            "secret_key": "secret", "linger": 0.0, "retry_seconds": 0.001, "retry_seconds_max": 0.01, "breaker": QUICK,
        }  # fmt: skip
        self.tiers: list[S3Tier] = []

    def tier(self, **settings: Any) -> S3Tier:
        tier = S3Tier(S3Settings(**{**self.settings, **settings}))
        self.tiers.append(tier)
        return tier

    def names(self, prefix: str = "") -> list[str]:
        """Names in the bucket, without the prefix that all have."""
        page = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self.prefix}/v1/{prefix}")
        return [entry["Key"].removeprefix(f"{self.prefix}/v1/") for entry in page.get("Contents", ())]

    def object(self, name: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=f"{self.prefix}/v1/{name}")["Body"].read()

    def overwrite(self, name: str, body: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=f"{self.prefix}/v1/{name}", Body=body)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=f"{self.prefix}/v1/{name}")


@pytest.fixture
def bench(client: Any, s3_url: str) -> Iterator[Bench]:
    """Tiers that talk to the server itself."""
    bench = Bench(client, s3_url)
    yield bench
    for tier in bench.tiers:
        tier.close()
        tier.check_integrity()


@pytest.fixture
def faulty(client: Any, proxy: FaultProxy) -> Iterator[Bench]:
    """Tiers that talk to the server through the proxy, which is well again at the end."""
    bench = Bench(client, proxy.url)
    yield bench
    proxy.heal()
    for tier in bench.tiers:
        tier.close()
        tier.check_integrity()


@pytest.fixture
def make_key() -> Callable[..., ChunkKey]:
    def make(number: int, namespace: bytes = b"n" * 32, rank: int = 0) -> ChunkKey:
        return ChunkKey(namespace, number.to_bytes(2, "big") * 16, 16, rank)

    return make
