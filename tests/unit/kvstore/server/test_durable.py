"""A node server over the disk tier is killed under load: what it acknowledged as durable is there afterwards."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline_kvstore import ChunkKey
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.wire.address import Address

SCRIPT = Path(__file__).parent / "serve_disk.py"
Key = Callable[..., ChunkKey]


@contextmanager
def server(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(folder / "disk"), str(folder / "kv.sock")])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(20_000 + number)


def test_kill_9_under_load_loses_nothing_that_was_acknowledged_as_durable(tmp_path: Path, key: Key, wait: Any) -> None:
    (tmp_path / "disk").mkdir()
    address, options = Address(path=str(tmp_path / "kv.sock")), RemoteOptions(backoff=0.01, backoff_max=0.05)
    tier = RemoteTier(address, options)
    stop, acknowledged, failures = threading.Event(), set[int](), list[BaseException]()

    def write(first: int) -> None:
        try:
            for number in range(first, 10**6, 2):
                if stop.is_set():
                    return
                if tier.put(key(number), payload_of(number), durable=True):
                    acknowledged.add(number)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(first,)) for first in range(2)]
    for writer in writers:
        writer.start()
    for _ in range(2):
        before = len(acknowledged)
        with server(tmp_path) as process:
            wait("some are kept", lambda before=before: failures or len(acknowledged) > before + 20)
            process.kill()
            process.wait()
    stop.set()
    for writer in writers:
        writer.join()
    assert failures == []
    with server(tmp_path):
        wait("it is back", lambda: tier.capacity and tier.contains([key(min(acknowledged))]))
        for number in acknowledged:
            assert tier.get(key(number)) == payload_of(number), f"chunk {number} was lost"
    assert tier.stats.corrupt == 0
    tier.close()
