"""A real S3 server for whoever needs one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

IDENTITIES = {
    "identities": [
        {"name": "test", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin"]},
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


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SeaweedFS with its S3 gateway; the identities "key" may do everything, "readkey" may read."""
    data = tmp_path_factory.mktemp("weed")
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
    log = (data / "log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", s3_port), 0.2).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (data / "log").read_text()
            time.sleep(0.05)
    yield f"http://127.0.0.1:{s3_port}"
    process.kill()
    process.wait(30)
    log.close()
