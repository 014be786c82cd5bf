"""A store of prefixes that can't be had is refused before the engine serves, with one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_engine.backends.simulated import SimulatedBackend
from paceline_engine.config import EngineConfig
from paceline_engine.core_setup import open_prefixes
from paceline_engine.sizing import SetupError

NAMESPACE = "ab" * 32
CONFIG = {"model_dir": "", "device": "simulated"}


class Copier:
    """KV of 4 KiB a token that nobody copies."""

    block_size = 16

    def num_bytes(self, num_tokens: int) -> int:
        return num_tokens << 12


def device(copier: Copier | None) -> SimulatedBackend:
    backend = SimulatedBackend(vocab_size=9, seed=0, eos_token_ids=(), alpha_ms=0.0, beta_ms=0.0, hidden_size=4)
    if copier is not None:
        backend.chunk_copier = copier
    return backend


def test_without_a_folder_there_is_none():
    assert open_prefixes(EngineConfig(**CONFIG), device(Copier()), NAMESPACE) is None


def test_one_folder_is_for_one_engine(tmp_path: Path):
    config = EngineConfig(**CONFIG, kv_store_disk=str(tmp_path / "kv"))
    store = open_prefixes(config, device(Copier()), NAMESPACE)
    assert store is not None
    with pytest.raises(SetupError, match=r"^kv-store-disk: .* is in use by process") as error:
        open_prefixes(config, device(Copier()), NAMESPACE)
    assert "\n" not in str(error.value)
    store.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"^kv-store-disk: "):
        open_prefixes(EngineConfig(**CONFIG, kv_store_disk=str(tmp_path / "file")), device(Copier()), NAMESPACE)


def test_a_capacity_for_a_few_chunks_is_too_small(tmp_path: Path):
    config = EngineConfig(**CONFIG, kv_store_disk=str(tmp_path / "kv"), kv_store_disk_bytes=32 << 20)
    store = open_prefixes(config, device(Copier()), NAMESPACE)
    assert store is not None
    store.close()
    config = EngineConfig(**CONFIG, kv_store_disk=str(tmp_path / "kv"), kv_store_disk_bytes=(32 << 20) - 1)
    with pytest.raises(SetupError, match="too few for chunks of 256 tokens; give it at least 32Mi"):
        open_prefixes(config, device(Copier()), NAMESPACE)


def test_a_device_whose_kv_can_not_be_copied_has_none(tmp_path: Path):
    config = EngineConfig(**CONFIG, kv_store_disk=str(tmp_path / "kv"))
    with pytest.raises(SetupError, match="KV of 1 simulated devices can't be stored; leave it out"):
        open_prefixes(config, device(None), NAMESPACE)
    with pytest.raises(ValueError, match="kv_store_disk needs enable_prefix_caching"):
        EngineConfig(model_dir="", kv_store_disk="kv", enable_prefix_caching=False)
