"""Settings of a store: what a document means, and one clear line for what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline_kvstore.config import BadSettings, DiskSettings, StoreSettings, parse_settings, parse_size
from paceline_kvstore.encoding import Encoding
from paceline_kvstore.policy.reuse import ReuseMode


def test_a_whole_document() -> None:
    settings = parse_settings(
        {
            "memory": {"capacity": "8Gi"},
            "disk": {"path": "/kv", "capacity": 10**9},
            "s3": {"bucket": "models", "prefix": "kv", "endpoint": "http://s3", "credentialsDir": "/secret"},
            "ttl": 3600,
            "reuse": "always",
            "tenantQuotas": {"acme": "1Mi"},
            "defaultQuota": 5,
            "encoding": "int8",
        }
    )
    assert settings.encoding is Encoding.INT8
    assert settings.memory == 8 << 30
    assert settings.disk == DiskSettings(Path("/kv"), 10**9)
    assert settings.s3 is not None
    assert (settings.s3.bucket, settings.s3.prefix, settings.s3.endpoint) == ("models", "kv", "http://s3")
    assert settings.s3.credentials_dir == Path("/secret")
    assert (settings.ttl, settings.reuse) == (3600.0, ReuseMode.ALWAYS)
    assert (settings.tenant_quotas, settings.default_quota) == ({"acme": 1 << 20}, 5)


def test_what_is_left_out_has_its_default() -> None:
    assert parse_settings({"memory": {"capacity": "1Mi"}, "ttl": None}) == StoreSettings(memory=1 << 20)


def test_numbers_that_are_near_the_right_ones_are_of_another_namespace() -> None:
    disk = DiskSettings(Path("/kv"), 1 << 20)
    digests = {form: StoreSettings(disk=disk, encoding=form).namespace(b"n" * 32) for form in Encoding}
    assert digests[Encoding.NONE] == digests[Encoding.ZSTD] == b"n" * 32
    assert len({*digests.values()}) == 3 and {len(digest) for digest in digests.values()} == {32}


MEMORY = {"memory": {"capacity": "1Mi"}}


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({}, "memory, disk, node, s3: no tier is set: set at least one of them"),
        ([], "settings: [] is not an object: write {...}"),
        (MEMORY | {"encoding": "zstd"}, "encoding: it is for disk and S3, and neither is set: leave it out"),
        (MEMORY | {"encoding": "gzip"}, "encoding: 'gzip' is none of none, zstd, int8, fp8"),
        ({"memory": "8Gi"}, "memory: '8Gi' is not an object: write {...}"),
        ({"memory": {}}, "memory.capacity: it is missing"),
        ({"memory": {"capacity": "8GB"}}, "memory.capacity: '8GB' is not a number of bytes: write one like 1048576 or"),
        ({"memory": {"capacity": True}}, "memory.capacity: True is not a number of bytes"),
        ({"memory": {"capacity": -1}}, "memory.capacity: -1 is not a number of bytes"),
        ({"memory": {"capacity": 4096}}, "memory.capacity: 4096 bytes are too few: 65536 or more"),
        ({"memory": {"capacity": "1Mi", "size": 1}}, "memory.size: there is no such setting: write capacity"),
        ({"disk": {"capacity": "1Gi"}}, "disk.path: it is missing"),
        ({"disk": {"path": "kv", "capacity": "1Gi"}}, "disk.path: 'kv' is not an absolute path"),
        ({"s3": {"bucket": "No"}}, "s3: bucket 'No' is no bucket's name"),
        ({"s3": {"bucket": "fleet-kv", "endpoint": "s3.example"}}, "s3: endpoint 's3.example' must begin with http"),
        ({"s3": {"bucket": 3}}, "s3.bucket: 3 is not a text"),
        ({"node": {"address": "here"}}, "node.address: 'here' is no address of a KV server: write tcp://HOST:PORT"),
        (MEMORY | {"encryptionKeyFile": "keys"}, "encryptionKeyFile: 'keys' is not an absolute path"),
        (MEMORY | {"ttl": 0}, "ttl: 0 is not a number of seconds above 0"),
        (MEMORY | {"ttl": float("nan")}, "ttl: nan is not a number of seconds above 0"),
        (MEMORY | {"reuse": "auto"}, "reuse: 'auto' is none of measured, always, never"),
        (MEMORY | {"tenantQuotas": {"acme": "many"}}, "tenantQuotas.acme: 'many' is not a number of bytes"),
        (MEMORY | {"tenantQuotas": 3}, "tenantQuotas: 3 is not an object: write {TENANT: BYTES}"),
        (
            MEMORY | {"encryption": "yes"},
            "encryption: there is no such setting: write defaultQuota, disk, encoding, encryptionKeyFile",
        ),
    ],
    ids=json.dumps,
)
def test_a_bad_setting_is_one_line_that_names_it(document: Any, line: str) -> None:
    with pytest.raises(BadSettings) as caught:
        parse_settings(document)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("5k", 5000), ("3Ki", 3072), ("2T", 2 * 10**12)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
