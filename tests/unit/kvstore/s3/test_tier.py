"""The S3 tier on a real S3 server."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import xxhash

from paceline_kvstore import ChunkKey, KVStoreError, codec
from paceline_kvstore.breaker import Outcome
from paceline_kvstore.errors import TierFault
from paceline_kvstore.s3 import pack, session
from paceline_kvstore.s3.lifecycle import apply_lifecycle
from paceline_kvstore.s3.session import make_client, make_session
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.tiers import Tier
from paceline_kvstore.tiers.s3 import S3Tier, open_s3

Key = Callable[..., ChunkKey]
MIB = 1 << 20


def state(number: int, num_bytes: int = 3000) -> bytes:
    return number.to_bytes(2, "big") * (num_bytes // 2)


def put_chain(tier: Any, keys: Sequence[ChunkKey], tenant: str = "") -> None:
    """The keys' states, each after its parent, as an engine offers them."""
    for n, key in enumerate(keys):
        parent = keys[n - 1] if n else None
        assert tier.put(key, state(int.from_bytes(key.chain[:2], "big")), parent=parent, tenant=tenant)
    assert tier.flush()


def held(tier: Any, keys: Sequence[ChunkKey]) -> list[int]:
    """The numbers of the keys whose right state is there; fails on a wrong one."""
    found = []
    for key in keys:
        number = int.from_bytes(key.chain[:2], "big")
        if (payload := tier.get(key)) is not None:
            assert payload == state(number)
            found.append(number)
    return found


def test_a_chunk_is_there_for_every_process(bench: Any, make_key: Key):
    tier: Tier = open_s3(S3Settings(**bench.settings))
    assert tier.put(make_key(1), state(1), durable=True)
    tier.close()
    tier = open_s3(S3Settings(**bench.settings))
    assert tier.contains([make_key(1), make_key(2)]) == 1
    assert tier.get(make_key(1)) == state(1)
    assert tier.get(make_key(2)) is None
    target = bytearray(4000)
    assert tier.read_into(make_key(1), target) == 3000 and target[:3000] == state(1)
    with pytest.raises(ValueError, match="the payload has 3000 bytes, the buffer 2999"):
        tier.read_into(make_key(1), bytearray(2999))
    with tier.lease(make_key(1)) or pytest.fail("no lease") as payload:
        assert payload == state(1) and payload.readonly
    assert list(tier.keys()) == [make_key(1)]
    assert (tier.stats.hits, tier.stats.misses) == (4, 1)
    tier.close()
    tier.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 3967, 3968, 3969, 8192 - 128, 8192, 20_000])
def test_any_size_comes_back_whole(num_bytes: int, bench: Any, make_key: Key):
    data = os.urandom(num_bytes)
    assert bench.tier().put(make_key(1), data, durable=True)
    tier = bench.tier(range_bytes=4096)
    assert tier.get(make_key(1)) == data  # Size unknown at first,
    assert tier.get(make_key(1)) == data  # known,
    tier = bench.tier(range_bytes=4096)
    assert tier.contains([make_key(1)]) == 1
    assert tier.get(make_key(1)) == data  # and known by a lookup.


def test_a_large_chunk_goes_in_parts_and_comes_in_ranges(faulty: Any, proxy: Any, make_key: Key):
    data = os.urandom(11 * MIB)
    tier = faulty.tier(multipart_bytes=8 * MIB, part_bytes=5 * MIB, range_bytes=4 * MIB)
    assert tier.put(make_key(1), data, durable=True)
    assert sum("partNumber" in request.path for request in proxy.requests) == 3
    assert tier.get(make_key(1)) == data
    assert proxy.count("GET") == 3
    assert bytes(tier.get(make_key(1))) == data


def test_what_is_there_is_not_uploaded_again(bench: Any, make_key: Key):
    assert bench.tier().put(make_key(1), state(1), durable=True)
    (name,) = bench.names()
    before = bench.client.head_object(Bucket=bench.settings["bucket"], Key=f"{bench.prefix}/v1/{name}")
    tier = bench.tier()
    assert tier.put(make_key(1), state(1), durable=True)
    assert bench.client.head_object(Bucket="kvstore", Key=f"{bench.prefix}/v1/{name}")["ETag"] == before["ETag"]
    assert (tier.stats.puts, tier.stats.existing, tier.stats.bytes_written) == (1, 1, 0)
    assert tier.put(make_key(1), state(1))  # Known now: not even asked for.
    assert tier.stats.existing == 2


def test_one_of_many_writers_stores_it(bench: Any, make_key: Key):
    tiers = [bench.tier() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda tier: tier.put(make_key(1), state(1), durable=True), tiers))
    assert sum(tier.stats.bytes_written > 0 for tier in tiers) == 1
    assert len(bench.names()) == 1


def test_small_chunks_of_a_chain_share_an_object(bench: Any, faulty: Any, proxy: Any, make_key: Key):
    keys = [make_key(n) for n in range(12)]
    put_chain(faulty.tier(linger=60.0), keys)
    (name,) = faulty.names()
    assert faulty.object(name)[:8] == b"PCLKVPAK"
    proxy.requests.clear()
    tier = faulty.tier()
    assert tier.contains(keys) == 12
    assert len(proxy.requests) == 1
    assert held(tier, [keys[7]]) == [7]
    assert proxy.requests[1].headers["range"].startswith("bytes=")
    assert tier.stats.bytes_read == codec.encoded_size(3000)
    assert held(tier, keys) == list(range(12))
    assert sorted(tier.keys(), key=str) == sorted(keys, key=str)


def test_a_longer_chain_adds_what_is_missing(bench: Any, make_key: Key):
    keys = [make_key(n) for n in range(12)]
    put_chain(bench.tier(linger=60.0), keys[:5])
    writer = bench.tier(linger=60.0)
    put_chain(writer, keys)
    assert (writer.stats.puts, writer.stats.existing) == (12, 5)
    assert bench.tier().contains(keys) == 12
    tier = bench.tier()
    tier.contains(keys)
    assert held(tier, keys) == list(range(12))


def test_chains_that_part_share_their_beginning(bench: Any, make_key: Key):
    one = [make_key(n) for n in range(6)]
    other = [*one[:3], *(make_key(n) for n in range(10, 13))]
    put_chain(bench.tier(linger=60.0), one)
    put_chain(bench.tier(linger=60.0), other)
    tier = bench.tier()
    assert tier.contains(other) == 6
    assert tier.contains(one) == 6
    assert len(bench.names()) == 2


def test_packs_mix_neither_chains_nor_tenants(bench: Any, make_key: Key):
    tier = bench.tier(linger=60.0)
    one, other = [make_key(n) for n in range(3)], [make_key(n) for n in range(10, 13)]
    for n in range(3):
        tier.put(one[n], state(n), parent=one[n - 1] if n else None, tenant="a")
        tier.put(other[n], state(10 + n), parent=other[n - 1] if n else None, tenant="b")
    tier.put(make_key(20), state(20), parent=one[2], tenant="b")
    assert tier.flush()
    assert len(bench.names()) == 3
    assert bench.tier().contains(other) == 3


def test_a_pack_holds_only_so_much(bench: Any, make_key: Key):
    keys = [make_key(n) for n in range(50)]
    put_chain(bench.tier(linger=60.0, pack_bytes=16_000, pack_chunk_bytes=4000), keys)
    assert all(len(bench.object(name)) <= 16_000 + 4096 for name in bench.names())
    assert bench.tier().contains(keys) == 50


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "flipped": lambda body, other: body[:-7] + bytes([body[-7] ^ 4]) + body[-6:],
    "short": lambda body, other: body[:-1],
    "header only": lambda body, other: body[:128],
    "less than a header": lambda body, other: body[:50],
    "empty": lambda body, other: b"",
    "garbage": lambda body, other: os.urandom(len(body)),
    "another key's": lambda body, other: other,
    "another version": lambda body, other: body[:8] + b"\x09" + body[9:],
    "no pack": lambda body, other: b"PCLKVPAK" + body[8:],
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_bad_object_is_a_miss_counted_and_replaced(what: str, bench: Any, make_key: Key):
    writer = bench.tier()
    assert writer.put(make_key(1), state(1), durable=True)
    foreign = make_key(1, namespace=b"m" * 32)
    assert writer.put(foreign, state(2), durable=True)
    name, other = (names[0] for names in (bench.names("6e"), bench.names("6d")))
    bench.overwrite(name, DAMAGE[what](bench.object(name), bench.object(other)))
    for tier in (writer, bench.tier()):  # One that knows where it was and one that does not.
        assert tier.get(make_key(1)) is None
        assert tier.quarantine.total == tier.stats.corrupt == 1
        assert tier.get(foreign) == state(2)
    assert tier.put(make_key(1), state(1), durable=True)
    assert tier.get(make_key(1)) == state(1)
    assert bench.tier().get(make_key(1)) == state(1)


def test_an_object_with_bytes_too_many_is_refused(bench: Any, make_key: Key):
    assert bench.tier().put(make_key(1), state(1), durable=True)
    (name,) = bench.names()
    bench.overwrite(name, bench.object(name) + b"x")
    tier = bench.tier()
    assert tier.contains([make_key(1)]) == 0
    assert tier.get(make_key(1)) is None
    assert tier.quarantine.total == 2


def test_a_lookup_does_not_count_a_bad_object(bench: Any, make_key: Key):
    assert bench.tier().put(make_key(1), state(1), durable=True)
    bench.overwrite(bench.names()[0], b"x" * 3128)
    tier = bench.tier()
    assert tier.contains([make_key(1)]) == 0
    assert tier.quarantine.total == 1
    assert tier.put(make_key(1), state(1), durable=True)
    assert bench.tier().contains([make_key(1)]) == 1


def test_one_bad_chunk_of_a_pack_spoils_no_other(bench: Any, make_key: Key):
    keys = [make_key(n) for n in range(1, 5)]
    put_chain(bench.tier(linger=60.0), keys)
    (name,) = bench.names()
    body = bytearray(bench.object(name))
    body[body.index(state(2)[:64])] ^= 1
    bench.overwrite(name, bytes(body))
    tier = bench.tier()
    assert tier.contains(keys) == 4
    assert held(tier, keys) == [1, 3, 4]
    assert tier.quarantine.counts == {"corrupt": 1, "foreign": 0, "version": 0}
    assert tier.put(keys[1], state(2), durable=True)
    assert held(tier, keys) == [1, 2, 3, 4]


def test_an_object_that_goes_between_lookup_and_get_is_a_miss(bench: Any, make_key: Key):
    tier = bench.tier()
    assert tier.put(make_key(1), state(1), durable=True)
    assert tier.contains([make_key(1)]) == 1
    bench.remove(bench.names()[0])
    assert tier.get(make_key(1)) is None
    assert (tier.stats.errors, tier.stats.corrupt) == (0, 0)
    assert tier.put(make_key(1), state(1), durable=True)
    assert tier.get(make_key(1)) == state(1)


def test_a_missing_bucket_is_a_fault_and_no_miss(bench: Any, make_key: Key):
    with pytest.raises(TierFault, match="NoSuchBucket"):
        bench.tier(bucket="nobody-made-it").get(make_key(1))


@pytest.mark.parametrize("gone", range(4))
def test_deleting_one_chunk_of_a_pack_leaves_the_others(gone: int, bench: Any, make_key: Key):
    keys = [make_key(n) for n in range(4)]
    tier = bench.tier(linger=60.0)
    put_chain(tier, keys, tenant="a")
    assert tier.delete(keys[gone])
    assert not tier.delete(keys[gone])
    left = [n for n in range(4) if n != gone]
    assert held(tier, keys) == left
    assert sorted(bench.tier().keys(), key=str) == [keys[n] for n in left]
    assert state(gone) not in b"".join(bench.object(name) for name in bench.names()) or gone == 0
    assert bench.tier().clear(tenant="a") == 3


def test_delete_reaches_what_was_not_written_yet(bench: Any, make_key: Key):
    tier = bench.tier(linger=60.0)
    assert tier.put(make_key(1), state(1))
    assert tier.delete(make_key(1))
    assert tier.flush()
    assert tier.get(make_key(1)) is None and bench.names() == []
    assert not tier.delete(make_key(2))


def test_clear_takes_a_namespace_or_a_tenant_and_nothing_else(bench: Any, make_key: Key):
    tier = bench.tier(linger=60.0)
    other = make_key(9, namespace=b"m" * 32)
    put_chain(tier, [make_key(n) for n in range(3)], tenant="a")
    put_chain(tier, [make_key(n) for n in range(3, 5)], tenant="ü")
    put_chain(tier, [other], tenant="a")
    assert tier.clear(tenant="nobody") == 0
    assert tier.clear(tenant="a", namespace=b"n" * 32) == 3
    assert held(tier, [*(make_key(n) for n in range(5)), other]) == [3, 4, 9]
    assert bench.tier().contains([make_key(3), make_key(4)]) == 2
    tier.put(make_key(5), state(5), tenant="ü")
    assert tier.clear(tenant="ü") == 3
    assert list(bench.tier().keys()) == [other]
    assert tier.clear() == 1
    assert bench.names() == [] and tier.bytes_used == 0


def test_what_waits_to_be_written_is_already_served(bench: Any, make_key: Key):
    tier = bench.tier(linger=60.0)
    assert tier.put(make_key(1), state(1))
    assert bench.names() == []
    assert tier.get(make_key(1)) == state(1)
    assert tier.contains([make_key(1)]) == 1
    tier.close()  # Which writes it.
    assert bench.tier().get(make_key(1)) == state(1)


def test_a_full_queue_refuses_the_newest(bench: Any, make_key: Key):
    tier = bench.tier(linger=60.0, queue_bytes=2 * codec.encoded_size(3000))
    assert [tier.put(make_key(n), state(n)) for n in range(4)] == [True, True, False, False]
    assert (tier.stats.dropped, tier.stats.refused) == (2, 2)
    assert tier.flush()  # What was taken is durable.
    assert held(bench.tier(), [make_key(n) for n in range(4)]) == [0, 1]
    assert tier.put(make_key(4), state(4))


def test_capacity_bounds_what_a_process_adds(bench: Any, make_key: Key):
    tier = bench.tier(capacity=2 * codec.encoded_size(3000))
    assert [tier.put(make_key(n), state(n), durable=True) for n in range(3)] == [True, True, False]
    assert tier.bytes_used == tier.capacity
    assert tier.delete(make_key(0))
    assert tier.put(make_key(2), state(2), durable=True)


def test_a_reader_may_read_and_its_puts_are_not_acknowledged(bench: Any, make_key: Key):
    assert bench.tier().put(make_key(1), state(1), durable=True)
    reader = bench.tier(access_key="readkey", secret_key="readsecret", drain_seconds=0.3)
    assert not reader.put(make_key(2), state(2), durable=True)
    assert not reader.flush()
    assert reader.get(make_key(1)) == state(1)
    assert reader.stats.denied >= 1
    assert len(bench.names()) == 1


def test_wrong_credentials_are_a_fault_that_says_so(bench: Any, make_key: Key):
    with pytest.raises(TierFault, match=r"403 .*check credentials and permissions") as refused:
        bench.tier(secret_key="wrong").get(make_key(1))
    assert refused.value.outcome is Outcome.DENIED


def test_credentials_come_from_a_mounted_secret(bench: Any, make_key: Key, tmp_path: Path):
    keys = {"access_key": None, "secret_key": None, "credentials_dir": tmp_path}
    with pytest.raises(KVStoreError, match=r"no credentials of S3 in .*: mount the Secret there"):
        bench.tier(**keys)
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text("key\n")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("secret\n")
    assert bench.tier(**keys).put(make_key(1), state(1), durable=True)


def test_a_rotated_secret_is_read_again(bench: Any, make_key: Key, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(session, "_FILES_LIFE", timedelta(minutes=14))  # botocore renews those at every request.
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text("key")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("old")
    tier = bench.tier(access_key=None, secret_key=None, credentials_dir=tmp_path)
    with pytest.raises(TierFault, match="403"):
        tier.get(make_key(1))
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("secret")
    assert tier.get(make_key(1)) is None


def test_credentials_come_from_the_environment(bench: Any, make_key: Key, monkeypatch: Any):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert bench.tier(access_key=None, secret_key=None).put(make_key(1), state(1), durable=True)


@pytest.mark.parametrize(
    ("style", "endpoint", "url"),
    [
        (None, "http://s3.local:9000", "http://s3.local:9000/kvstore/x"),
        (True, "http://s3.local:9000", "http://s3.local:9000/kvstore/x"),
        (False, "http://s3.local:9000", "http://kvstore.s3.local:9000/x"),
        (None, None, "https://kvstore.s3.amazonaws.com/x"),
    ],
)
def test_the_bucket_is_in_the_path_or_the_host(style: bool | None, endpoint: str | None, url: str):
    settings = S3Settings(bucket="kvstore", endpoint=endpoint, path_style=style, access_key="a", secret_key="b")
    client = make_client(make_session(settings), settings, connections=1, read_timeout=1.0)
    asked = client.generate_presigned_url("get_object", {"Bucket": "kvstore", "Key": "x"})
    assert asked.partition("?")[0] == url


def test_a_private_authority_is_trusted_when_it_is_named(bench: Any, secure: Any, make_key: Key):
    proxy, authority = secure
    tier = bench.tier(endpoint=proxy.url, ca_file=authority, range_bytes=4096)
    assert tier.put(make_key(1), state(1, 20_000), durable=True)
    assert tier.get(make_key(1)) == state(1, 20_000)
    with pytest.raises(TierFault, match="certificate"):
        bench.tier(endpoint=proxy.url).get(make_key(1))


def test_uploads_that_died_are_swept(bench: Any, make_key: Key):
    tier = bench.tier()
    assert tier.put(make_key(1), state(1), durable=True)
    name = f"{bench.prefix}/v1/{bench.names()[0]}"
    bench.client.create_multipart_upload(Bucket="kvstore", Key=name)
    assert tier.sweep() == 0
    assert tier.sweep(older_than_seconds=-60.0) == 1
    assert not bench.client.list_multipart_uploads(Bucket="kvstore", Prefix=bench.prefix).get("Uploads")
    assert tier.get(make_key(1)) == state(1)


def test_lifecycle_rules_join_those_of_the_bucket(bench: Any):
    bench.client.create_bucket(Bucket="ruled")
    theirs = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}
    bench.client.put_bucket_lifecycle_configuration(Bucket="ruled", LifecycleConfiguration={"Rules": [theirs]})
    settings = S3Settings(**{**bench.settings, "bucket": "ruled"})
    for days in (30, 7):
        apply_lifecycle(settings, expire_days=days)
    rules = {rule["ID"]: rule for rule in bench.client.get_bucket_lifecycle_configuration(Bucket="ruled")["Rules"]}
    assert len(rules) == 3 and rules["theirs"]["Expiration"] == {"Days": 3}
    (ours,) = (rule for name, rule in rules.items() if "expire" in name)
    assert ours["Expiration"]["Days"] == 7 and ours["Filter"]["Prefix"] == f"{bench.prefix}/"
    with pytest.raises(KVStoreError, match="did not take the lifecycle rules"):
        apply_lifecycle(S3Settings(**{**bench.settings, "bucket": "nobody-made-it"}), expire_days=1)


def test_after_close_nothing_is_taken_and_reads_are_faults(bench: Any, make_key: Key):
    tier: S3Tier = bench.tier()
    tier.close()
    assert not tier.put(make_key(1), state(1))
    with pytest.raises(TierFault, match="closed"):
        tier.get(make_key(1))


def test_a_forged_pack_costs_a_miss_and_no_memory(bench: Any, make_key: Key):
    """Its index is intact and promises more than any object has: nobody may ask for that much."""
    chunk = codec.encode(make_key(1), state(1))
    entries = [(make_key(1), 384, len(chunk)), (make_key(2), 384, 1 << 60), (make_key(3), 1 << 60, len(chunk))]
    index = struct.pack("<8sHHI", pack.MAGIC, pack.VERSION, len(entries), 0)
    index += b"".join(key.to_bytes() + struct.pack("<QQ", offset, length) for key, offset, length in entries)
    body = (index + xxhash.xxh3_128_digest(index)).ljust(384, b"\0") + bytes(chunk)
    bench.overwrite(f"{make_key(1).namespace.hex()}/{make_key(1).chain.hex()}-16-0", body)
    tier = bench.tier()
    assert [tier.get(make_key(n), deadline=20.0) for n in (1, 2, 3)] == [None] * 3
    assert tier.contains([make_key(1)]) == 0
    assert tier.stats.errors == 0
    assert tier.put(make_key(1), state(1), durable=True)
    assert tier.get(make_key(1)) == state(1)


def test_objects_of_others_under_the_prefix_are_neither_served_nor_touched(bench: Any, make_key: Key):
    tier = bench.tier()
    assert tier.put(make_key(1), state(1), durable=True)
    chain = make_key(2).chain.hex()
    foreign = [
        "notes.txt",
        f"{'6e' * 32}/readme",
        f"{'6e' * 32}/{chain}-016-0",
        f"{'6E' * 32}/{chain}-16-0",
        f"{chain}-16-0",
    ]
    for name in foreign:
        bench.overwrite(name, b"theirs")
    assert list(tier.keys()) == [make_key(1)]
    assert tier.contains([make_key(1), make_key(2)]) == 1
    assert tier.get(make_key(2)) is None
    assert tier.quarantine.total == 0
    assert tier.clear() == 1
    assert sorted(bench.names()) == sorted(foreign)


def test_bad_objects_without_end_are_counted_and_only_the_latest_remembered(bench: Any, make_key: Key):
    tier = bench.tier()
    names = [f"{'6e' * 32}/{make_key(n).chain.hex()}-16-0" for n in range(70)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: bench.overwrite(name, b"garbage"), names))
    assert [tier.get(make_key(n)) for n in range(70)] == [None] * 70
    assert tier.quarantine.counts["corrupt"] == tier.stats.corrupt == 70
    assert [refusal.key for refusal in tier.quarantine.latest()] == [make_key(n) for n in range(6, 70)]


def test_a_pack_damaged_anywhere_gives_right_chunks_or_none(bench: Any, make_key: Key):
    keys = [make_key(n) for n in range(1, 7)]
    put_chain(bench.tier(linger=60.0), keys)
    (name,) = bench.names()
    good, dice = bench.object(name), random.Random(3)
    knowing, found = bench.tier(), []
    assert knowing.contains(keys) == 6
    for number in range(24):
        body = bytearray(good)
        at = dice.randrange(1000 if number % 2 else len(body))  # Half of them in the index and the first header.
        if number % 4 == 3:
            del body[at:]
        else:
            body[at] ^= 1 << dice.randrange(8)
        bench.overwrite(name, bytes(body))
        if number % 6 == 0:
            knowing = bench.tier()
        found += [held(knowing, keys), held(knowing, keys)]  # With what is known of its places, and without.
        assert knowing.contains(keys) <= 6
    assert [] in found, "without an index nothing is found"
    assert any(0 < len(numbers) < 6 for numbers in found), "a chunk that is hit spoils no other"
    bench.overwrite(name, good)
    assert held(bench.tier(), keys[:1]) == [1]
