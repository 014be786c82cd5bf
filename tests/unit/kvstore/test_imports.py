"""The store works where torch is not installed: whole, and with payloads as bytes, memoryviews and numpy arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import importlib, pkgutil, sys
for name in ("torch", "triton", "transformers", "paceline_engine", "paceline_operator"):
    sys.modules[name] = None  # Importing it fails from here on.

import numpy as np
import paceline_kvstore
for module in pkgutil.walk_packages(paceline_kvstore.__path__, "paceline_kvstore."):
    importlib.import_module(module.name)

from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.config import parse_settings
from paceline_kvstore.opening import open_store

settings = parse_settings({"memory": {"capacity": "1Mi"}, "disk": {"path": sys.argv[1], "capacity": "8Mi"}})
payload = np.arange(1000, dtype=np.float32)
kinds = [payload.tobytes(), bytearray(payload), memoryview(payload), payload.data]
for number, kind in enumerate(kinds):
    store = open_store(settings)
    key = ChunkKey(b"n" * 32, bytes([number]) * 32, 16)
    assert store.offer(key, kind)
    assert store.drain(30.0)
    store.close()
    store = open_store(settings)  # From disk.
    fetch = store.fetch(store.lookup([key], bytes_per_token=250).plan)
    assert fetch.wait(30.0)
    ((found, lease),) = fetch.poll()
    assert found == key and np.array_equal(np.frombuffer(lease.payload, np.float32), payload)
    lease.release()
    store.close()
assert not [name for name, module in sys.modules.items() if name.startswith("torch") and module is not None]
"""


def test_the_whole_store_works_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "kv")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
