"""The S3 tier's pure parts: names, packs, hedging, settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_kvstore import ChunkKey, CorruptChunk, KVStoreError, UnsupportedVersion, codec
from paceline_kvstore.policy import hedge
from paceline_kvstore.policy.hedge import HedgePolicy
from paceline_kvstore.s3 import names, pack
from paceline_kvstore.s3.lifecycle import lifecycle
from paceline_kvstore.s3.pack import Span
from paceline_kvstore.s3.places import Places
from paceline_kvstore.s3.settings import S3Settings

DIGESTS = st.binary(min_size=32, max_size=32)
COUNTS = st.integers(0, 2**32 - 1)
KEYS = st.builds(ChunkKey, DIGESTS, DIGESTS, st.integers(1, 2**32 - 1), COUNTS)
CHUNKS = st.dictionaries(KEYS, st.binary(max_size=300), min_size=1, max_size=pack.MAX_CHUNKS)


@given(KEYS, st.sampled_from(["p", "team/kv", "a.b=c"]))
def test_a_name_tells_its_key(key: ChunkKey, prefix: str):
    name = names.object_name(prefix, key)
    assert names.key_of(prefix, name) == key
    assert name.startswith(names.namespace_prefix(prefix, key.namespace))
    assert len(name) <= 1024 - 512 + len(prefix)


@given(KEYS, KEYS)
def test_different_keys_have_different_names(one: ChunkKey, other: ChunkKey):
    assert (one == other) == (names.object_name("p", one) == names.object_name("p", other))


@given(KEYS, st.data())
def test_other_names_are_nobodys(key: ChunkKey, data: st.DataObject):
    name = names.object_name("p", key)
    at = data.draw(st.integers(0, len(name) - 1))
    for other in (name + "x", name.replace("-", "-0"), f"q{name}", name[:at] + "?" + name[at + 1 :]):
        assert names.key_of("p", other) is None


@given(CHUNKS)
def test_a_pack_gives_its_chunks_by_span(payloads: dict[ChunkKey, bytes]):
    body = pack.build([(key, codec.encode(key, payload)) for key, payload in payloads.items()])
    assert pack.is_pack(body)
    assert len(body) <= pack.OBJECT_BYTES_MAX
    spans = pack.read_index(body[: pack.PEEK_BYTES], len(body))
    assert list(spans) == list(payloads)
    for key, span in spans.items():
        assert codec.decode(body[span.offset : span.offset + span.length], key) == payloads[key]
        assert span.offset % codec.HEADER_BYTES == 0


@given(CHUNKS, st.data())
def test_a_damaged_index_is_never_read(payloads: dict[ChunkKey, bytes], data: st.DataObject):
    body = pack.build([(key, codec.encode(key, payload)) for key, payload in payloads.items()])
    end = 16 + 88 * len(payloads) + 16
    bit = data.draw(st.integers(0, end * 8 - 1))
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptChunk, UnsupportedVersion)):
        pack.read_index(body, len(body))
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptChunk):
        pack.read_index(body[: data.draw(st.integers(0, end - 1))], len(body))


@given(CHUNKS)
def test_a_pack_cut_short_is_never_read(payloads: dict[ChunkKey, bytes]):
    body = pack.build([(key, codec.encode(key, payload)) for key, payload in payloads.items()])
    with pytest.raises(CorruptChunk, match=f"ends at {len(body)}, the object at {len(body) - 1}"):
        pack.read_index(body, len(body) - 1)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_pack(data: bytes):
    with pytest.raises(KVStoreError):
        pack.read_index(data, len(data))


def test_a_pack_has_a_bound():
    chunks = [(ChunkKey(b"n" * 32, bytes([n]) * 32, 1), b"x") for n in range(pack.MAX_CHUNKS + 1)]
    with pytest.raises(ValueError, match="1 to 40 chunks, not 41"):
        pack.build(chunks)
    with pytest.raises(ValueError, match="1 to 40 chunks, not 0"):
        pack.build([])


def test_a_read_is_hedged_after_the_95th_percentile_of_its_size():
    policy = HedgePolicy()
    assert policy.begin(1000) is None
    for n in range(40):
        policy.observe(1000, n / 100)
        policy.observe(8 << 20, 5.0)
    assert policy.begin(1000) == 0.38
    assert policy.begin(1023) == 0.38
    assert policy.begin(8 << 20) == 5.0
    assert policy.begin(1 << 20) is None
    for _ in range(hedge.SAMPLES):  # Old samples are forgotten.
        policy.observe(1000, 1.0)
    assert policy.begin(1000) == 1.0


@given(st.floats(0, 0.5), st.lists(st.booleans(), max_size=500))
def test_hedges_stay_within_their_share(share: float, wants: list[bool]):
    policy = HedgePolicy(share)
    hedged = 0
    for reads, want in enumerate(wants, 1):
        policy.begin(1000)
        hedged += want and policy.spend()
        assert hedged <= share * reads + 1e-9


def test_places_are_bounded_and_the_latest_stay():
    places = Places(limit=3)
    keys = [ChunkKey(b"n" * 32, bytes([n]) * 32, 1) for n in range(5)]
    for key in keys:
        places.add("object", {key: Span(0, 1)})
        places.add("object", {keys[0]: Span(0, 1)})
    assert [key in (keys[0], keys[3], keys[4]) for key in keys] == [places.find(key) is not None for key in keys]


def test_rules_name_only_the_prefix():
    rules = lifecycle(S3Settings(bucket="kvs", prefix="team/kv"), expire_days=7)["Rules"]
    assert {rule["Filter"]["Prefix"] for rule in rules} == {"team/kv/"}
    assert len({rule["ID"] for rule in rules}) == len(rules) == 2
    with pytest.raises(ValueError, match="expire_days must be 1 or more, it is 0"):
        lifecycle(S3Settings(bucket="kvs"), expire_days=0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bucket": "No"}, "bucket 'No' is no bucket's name"),
        ({"prefix": ""}, "prefix '' must be words"),
        ({"prefix": "/a"}, "prefix '/a' must be words"),
        ({"prefix": "a//b"}, "prefix 'a//b' must be words"),
        ({"prefix": "a" * 513}, "at most 512 characters"),
        ({"endpoint": "s3.local:9000"}, "endpoint 's3.local:9000' must begin with http"),
        ({"access_key": "a"}, "set both or neither"),
        ({"secret_key": "s"}, "set both or neither"),
        ({"access_key": "a", "secret_key": "s", "credentials_dir": "d"}, "two sources of credentials"),
        ({"session_token": "t"}, "session_token belongs to an access_key"),
        ({"read_workers": 0}, "read_workers must be 1 or more"),
        ({"read_timeout": 0}, "read_timeout must be more than 0 seconds"),
        ({"queue_bytes": -1}, "queue_bytes must not be negative"),
        ({"range_bytes": 4095}, "range_bytes must be 4096 or more"),
        ({"part_bytes": 1 << 20}, "part_bytes must be 5242880 or more"),
        ({"pack_bytes": 1 << 30}, "pack_bytes must be pack_chunk_bytes"),
        ({"pack_chunk_bytes": 9 << 20}, "pack_bytes must be pack_chunk_bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(settings: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says) as refused:
        S3Settings(**{"bucket": "kvs", **settings})
    assert "\n" not in str(refused.value)


def test_secrets_are_not_shown():
    settings = S3Settings(bucket="kvs", access_key="a", secret_key="hush", session_token="hush")
    assert "hush" not in repr(settings)
