"""A store of prefixes that can't be had is refused before the engine serves, with one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from paceline_engine.backends.simulated import SimulatedBackend
from paceline_engine.config import EngineConfig
from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.prefix_cache import PrefixCache
from paceline_engine.core.stored_prefixes import StoredPrefixes
from paceline_engine.core_setup import open_prefixes
from paceline_engine.prefix_warm_up import WarmUp
from paceline_engine.sizing import SetupError
from paceline_kvstore.keys import ChunkKey

NAMESPACE = "ab" * 32
CONFIG = {"model_dir": "", "device": "simulated"}


class Copier:
    """KV of 4 KiB a token that nobody copies."""

    block_size = 16

    def num_bytes(self, num_tokens: int) -> int:
        return num_tokens << 12

    def allocate(self, num_bytes: int) -> bytearray:
        return bytearray(num_bytes)


def device(copier: Copier | None) -> SimulatedBackend:
    backend = SimulatedBackend(vocab_size=9, seed=0, eos_token_ids=(), alpha_ms=0.0, beta_ms=0.0, hidden_size=4)
    if copier is not None:
        backend.chunk_copier = copier
    return backend


def on_disk(path: Path, capacity: int = 1 << 30, **settings: object) -> EngineConfig:
    document = {"disk": {"path": str(path), "capacity": capacity}, **settings}
    return EngineConfig(**CONFIG, kv_store=json.dumps(document))


def test_without_settings_there_is_none():
    assert open_prefixes(EngineConfig(**CONFIG), device(Copier()), NAMESPACE) is None


def test_one_folder_is_for_one_engine(tmp_path: Path):
    config = on_disk(tmp_path / "kv")
    store = open_prefixes(config, device(Copier()), NAMESPACE)
    assert store is not None
    with pytest.raises(SetupError, match=r"^KV store: .* is in use by process") as error:
        open_prefixes(config, device(Copier()), NAMESPACE)
    assert "\n" not in str(error.value)
    store.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"^KV store: "):
        open_prefixes(on_disk(tmp_path / "file"), device(Copier()), NAMESPACE)


def test_a_capacity_for_a_few_chunks_is_too_small(tmp_path: Path):
    store = open_prefixes(on_disk(tmp_path / "kv", 32 << 20), device(Copier()), NAMESPACE)
    assert store is not None
    store.close()
    for name, least, config in (
        ("disk", 32, on_disk(tmp_path / "kv", (32 << 20) - 1)),
        ("memory", 4, on_disk(tmp_path / "kv", memory={"capacity": "3Mi"})),
    ):
        says = rf"^KV store: {name}\.capacity: .* too few for chunks of 256 tokens; give it at least {least}Mi"
        with pytest.raises(SetupError, match=says):
            open_prefixes(config, device(Copier()), NAMESPACE)


def test_settings_say_which_tiers_there_are(tmp_path: Path):
    settings = {"memory": {"capacity": "64Mi"}, "reuse": "always", "tenantQuotas": {"acme": "1Gi"}}
    store = open_prefixes(on_disk(tmp_path / "kv", **settings), device(Copier()), NAMESPACE)
    assert store is not None
    assert [level.name for level in store.store.levels] == ["memory", "disk"]
    assert store.store.mode == "always"
    store.close()


def test_kv_that_is_kept_in_8_bits_has_keys_of_its_own(tmp_path: Path):
    names: set[ChunkKey] = set()
    for encoding in ("none", "int8"):
        store = open_prefixes(on_disk(tmp_path / encoding, encoding=encoding), device(Copier()), NAMESPACE)
        assert store is not None
        names.add(store._key(b"a" * 32))
        store.close()
    assert len(names) == 2
    in_8_bits = replace(on_disk(tmp_path / "c", encoding="int8"), kv_cache_dtype="int8")
    with pytest.raises(SetupError, match="KV store: encoding: int8 is for KV in 16 or 32 bits"):
        open_prefixes(in_8_bits, device(Copier()), NAMESPACE)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", "KV store: Expecting property name"),
        ("[]", "KV store: settings: .* is not an object"),
        ("{}", "KV store: memory, disk, node, s3: no tier is set"),
        ('{"disk": {"path": "kv", "capacity": "1Gi"}}', "KV store: disk.path: 'kv' is not an absolute path"),
    ],
)
def test_wrong_settings_are_one_line_that_names_the_field(document: str, says: str):
    with pytest.raises(SetupError, match=rf"^{says}") as error:
        open_prefixes(EngineConfig(**CONFIG, kv_store=document), device(Copier()), NAMESPACE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_warm_up_s": -1.0}, "kv_warm_up_s must not be negative"),
        ({"kv_warm_up_s": 1.0}, "kv_warm_up_s needs a KV store and prefix_index hash"),
        ({"kv_warm_up_s": 1.0, "kv_store": "{}", "prefix_index": "radix"}, "prefix_index hash"),
        ({"kv_handoff_lease_s": 0.0}, "kv_handoff_lease_s must be above 0 and at most 600, not 0"),
        ({"kv_handoff_lease_s": 601.0}, "kv_handoff_lease_s must be above 0 and at most 600, not 601"),
    ],
)
def test_a_warm_up_or_lease_that_can_not_be_is_refused_by_name(options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        EngineConfig(**CONFIG, **options)


def test_a_warm_up_needs_a_tier_that_outlives_the_engine(tmp_path: Path):
    config = EngineConfig(**CONFIG, kv_store=json.dumps({"memory": {"capacity": "64Mi"}}))
    prefixes = open_prefixes(config, device(Copier()), NAMESPACE)
    assert prefixes is not None
    with pytest.raises(SetupError, match=r"^kv-store-warm-up: no tier of the KV store outlives the engine"):
        WarmUp(prefixes, StoredPrefixes(BlockPool(1), PrefixCache(BlockPool(1), 16), 16, prefixes, 16), 1.0)
    prefixes.close()


def test_a_device_whose_kv_can_not_be_copied_has_none(tmp_path: Path):
    config = on_disk(tmp_path / "kv")
    with pytest.raises(SetupError, match="KV of 1 simulated devices can't be stored; leave it out"):
        open_prefixes(config, device(None), NAMESPACE)
    with pytest.raises(ValueError, match="a KV store needs enable_prefix_caching"):
        EngineConfig(model_dir="", kv_store=config.kv_store, enable_prefix_caching=False)
