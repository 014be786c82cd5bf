"""A store from its settings, and the snapshot of what it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline_kvstore.config import BadSettings, parse_settings
from paceline_kvstore.encoding import Element
from paceline_kvstore.errors import FolderUnusable
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.metrics import snapshot
from paceline_kvstore.opening import open_store
from paceline_kvstore.policy.reuse import ReuseMode
from paceline_kvstore.tiered.level import READ_SECONDS_BUCKETS
from paceline_kvstore.tiered.store import ChunkEvent, TieredStore

SECONDS = 20.0


def _keys(count: int) -> list[ChunkKey]:
    namespace = os.urandom(32)
    return [ChunkKey(namespace, number.to_bytes(32, "big"), 16) for number in range(count)]


def _document(folder: Path, **more: Any) -> dict[str, Any]:
    return {"memory": {"capacity": "1Mi"}, "disk": {"path": str(folder), "capacity": "8Mi"}} | more


def _load(store: TieredStore, keys: list[ChunkKey]) -> list[bytes]:
    lookup = store.lookup(keys, bytes_per_token=256)
    assert lookup.wait(SECONDS)
    fetch = store.fetch(lookup.plan, SECONDS)
    assert fetch.wait(SECONDS)
    return [bytes(lease.payload) for _, lease in fetch.poll()]


def test_a_store_from_settings_keeps_chunks_over_a_restart(tmp_path: Path) -> None:
    settings = parse_settings(_document(tmp_path / "kv", reuse="always", tenantQuotas={"acme": "1Mi"}))
    keys = _keys(4)
    store = open_store(settings)
    assert [level.name for level in store.levels] == ["memory", "disk"]
    assert store.mode is ReuseMode.ALWAYS
    for key in keys:
        assert store.offer(key, key.chain * 100, tenant="acme")
    assert store.drain(SECONDS)
    assert store.levels[0].tenants.used("acme") == 4 * 3200
    assert store.close(SECONDS)
    again = open_store(settings)
    assert _load(again, keys) == [key.chain * 100 for key in keys]
    again.close(SECONDS)


@pytest.mark.parametrize("form", ["zstd", "int8", "fp8"])
def test_a_disk_keeps_less_and_other_numbers_only_where_told(tmp_path: Path, form: str) -> None:
    document = {"disk": {"path": str(tmp_path / "kv"), "capacity": "8Mi"}, "encoding": form, "reuse": "always"}
    settings = parse_settings(document)
    (key,) = _keys(1)
    numbers = np.linspace(-1, 1, 1 << 14, dtype=np.float32)
    store = open_store(settings, element=Element.FLOAT32)
    assert store.offer(key, numbers.tobytes()) and store.flush(SECONDS)
    assert store.levels[0].tier.bytes_used < numbers.nbytes
    (loaded,) = _load(store, [key])
    store.close(SECONDS)
    error = np.abs(np.frombuffer(loaded, np.float32) - numbers).max()
    assert error == 0 if form == "zstd" else 0 < error < 0.05
    if form != "zstd":
        with pytest.raises(BadSettings, match=f"^encoding: {form} is for KV in 16 or 32 bits"):
            open_store(settings)


def test_a_folder_in_use_is_an_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    settings = parse_settings(_document(tmp_path / "kv"))
    store = open_store(settings)
    with pytest.raises(FolderUnusable, match="in use by process"):
        open_store(settings)
    store.close(SECONDS)
    open_store(settings).close(SECONDS)


def test_three_tiers_with_a_real_s3_server(tmp_path: Path, s3_url: str, bucket: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "AWS_ACCESS_KEY_ID").write_text("key")
    (secret / "AWS_SECRET_ACCESS_KEY").write_text("secret")
    s3 = {"bucket": bucket, "prefix": "store", "endpoint": s3_url, "credentialsDir": str(secret)}
    store = open_store(parse_settings(_document(tmp_path / "kv", s3=s3)))
    keys = _keys(3)
    for _ in range(2):
        for key in keys:
            assert store.offer(key, key.chain * 100)
    assert store.flush(SECONDS)
    assert store.close(SECONDS)
    # Another machine: nothing but the bucket.
    other = open_store(parse_settings(_document(tmp_path / "other", s3=s3)))
    lookup = other.lookup([*keys, *_keys(1)], bytes_per_token=200)
    assert lookup.wait(SECONDS)
    assert lookup.plan.tokens_by_level() == {"s3": 48}
    assert _load(other, keys) == [key.chain * 100 for key in keys]
    counted = snapshot(other)
    assert (counted.levels[2].hits, counted.levels[2].read_breaker) == (3, "closed")
    assert other.clear() >= 3
    other.close(SECONDS)


def test_a_node_server_is_a_level(tmp_path: Path) -> None:
    address = tmp_path / "kv.sock"
    command = [sys.executable, "-m", "paceline_kvstore.cli", "serve", "--memory", "16Mi", "--socket", str(address)]
    with subprocess.Popen([*command, "--admin-port", "0"], stderr=subprocess.DEVNULL) as server:
        while not address.exists():
            assert server.poll() is None
        settings = parse_settings({"node": {"address": f"unix://{address}"}})
        keys = _keys(3)
        first, second = open_store(settings), open_store(settings)
        for key in keys:
            assert first.offer(key, key.chain * 100)
        assert first.levels[0].writes.wait_idle(float("inf"))
        assert _load(second, keys) == [key.chain * 100 for key in keys]
        for store in (first, second):
            store.close(SECONDS)
        server.terminate()
        assert server.wait(SECONDS) == 0


def test_sealed_chunks_on_disk_are_read_with_the_key_alone(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("ab" * 32 + "\n")
    document = _document(tmp_path / "kv", encryptionKeyFile=str(key_file))
    keys = _keys(3)
    events: list[ChunkEvent] = []
    store = open_store(parse_settings(document), on_event=events.append)
    for key in keys:
        store.offer(key, b"secret tokens" * 100)
    assert store.drain(SECONDS)
    store.levels[1].tier.delete(keys[2])
    store.close(SECONDS)
    # Also of a tier that is inside another.
    assert ChunkEvent("disk", keys[2], is_held=False) in events
    assert all(b"secret tokens" not in path.read_bytes() for path in (tmp_path / "kv").glob("segment-*"))
    again = open_store(parse_settings(document))
    assert _load(again, keys[:2]) == [b"secret tokens" * 100] * 2
    again.close(SECONDS)
    key_file.write_text("cd" * 32)
    stranger = open_store(parse_settings(document))
    assert _load(stranger, keys[:2]) == []
    stranger.close(SECONDS)
    key_file.write_text("short")
    with pytest.raises(BadSettings, match=r"encryptionKeyFile: key file .* line 1"):
        open_store(parse_settings(document))


def test_the_snapshot_adds_up_and_is_plain(tmp_path: Path) -> None:
    store = open_store(parse_settings(_document(tmp_path / "kv")))
    keys = _keys(5)
    for key in keys:
        store.offer(key, bytes(1000))
    assert store.drain(SECONDS)
    store.levels[0].tier.clear()
    lookup = store.lookup(keys, 100)
    store.levels[1].tier.delete(keys[4])
    fetch = store.fetch(lookup.plan, SECONDS)
    assert fetch.wait(SECONDS)
    held = [lease for _, lease in fetch.poll()]
    counted = snapshot(store)
    memory, disk = counted.levels
    assert (memory.name, memory.writes, memory.written_bytes, memory.bytes_used) == ("memory", 5, 5000, 0)
    assert (disk.hits, disk.misses, disk.read_bytes) == (4, 1, 4000)
    assert disk.read_seconds_buckets[-1] == 4
    assert list(disk.read_seconds_buckets) == sorted(disk.read_seconds_buckets)
    assert len(disk.read_seconds_buckets) == len(READ_SECONDS_BUCKETS) + 1
    assert disk.read_p95_s is not None and disk.read_p95_s > 0
    assert (counted.leases, counted.lease_bytes) == (4, 4000)
    assert json.loads(json.dumps(counted.to_dict()))["levels"][1]["hits"] == 4
    for lease in held:
        lease.release()
    assert snapshot(store).leases == 0
    store.close(SECONDS)
