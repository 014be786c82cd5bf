"""Clients and the node server over real sockets: what is shared or refused, and that nobody suffers for another."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline_kvstore import ChunkKey, codec
from paceline_kvstore.config import parse_settings
from paceline_kvstore.opening import open_store
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.store import NodeStore, Pinned
from paceline_kvstore.tiers import Tier
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire.frames import HEAD_BYTES, Head
from paceline_kvstore.wire.messages import Reason

Key = Callable[..., ChunkKey]
Wire = Callable[[ChunkKey, bytes], bytes]
Wait = Callable[[str, Callable[[], Any]], None]
PAGE = 4096


def test_two_clients_share_a_chunk(node: Any, key: Key) -> None:
    writer: Tier = node.client()
    reader: Tier = node.client()
    assert reader.get(key(1)) is None
    assert writer.put(key(1), b"state" * 1000, tenant="a")
    for client in (writer, reader):
        assert client.get(key(1)) == b"state" * 1000
        target = bytearray(6000)
        assert client.read_into(key(1), target) == 5000 and target[:5000] == b"state" * 1000
        lease = client.lease(key(1))
        assert lease is not None
        with lease as payload:
            assert payload == b"state" * 1000 and payload.readonly
    assert writer.put(key(1), b"state" * 1000), "what is there already counts as kept"
    assert reader.contains([key(1), key(2)]) == 1
    assert (reader.stats.hits, reader.stats.misses, reader.stats.errors) == (3, 1, 0)
    assert (writer.stats.puts, writer.stats.errors) == (2, 0)


def test_the_rest_of_the_protocol_of_tiers(node: Any, key: Key) -> None:
    tier: Tier = node.client()
    assert tier.capacity == 1 << 20 and tier.bytes_used == 0
    for number in range(4):
        assert tier.put(key(number), bytes(number), tenant="ab"[number % 2])
    assert tier.bytes_used == node.tier.bytes_used == 4 * PAGE
    assert set(tier.keys()) == {key(number) for number in range(4)}
    assert tier.get(key(0)) == b""
    assert tier.delete(key(0)) and not tier.delete(key(0))
    assert tier.clear(tenant="b") == 2 and tier.clear(namespace=b"x" * 32) == 0
    assert list(tier.keys()) == [key(2)]
    assert not tier.flush() and not tier.put(key(9), b"x", durable=True), "memory promises nothing"
    assert tier.stats.refused == 1
    tier.close()
    tier.close()
    assert tier.get(key(2)) is None and not tier.put(key(2), b"x") and tier.stats.errors == 0
    assert node.tier.get(key(2)) == bytes(2), "closing a client takes nothing away"


def test_long_lists_of_keys_go_in_pages(start: Callable[..., Any], key: Key) -> None:
    node = start(capacity=5000 * PAGE)
    for number in range(5000):
        node.tier.put(key(number), b"x")
    tier = node.client()
    assert len(set(tier.keys())) == 5000
    keys = [key(number) for number in range(5001)]
    assert tier.contains(keys) == 5000 and tier.contains(keys[::-1]) == 0 and tier.contains([]) == 0


def test_a_buffer_that_is_too_small_is_the_callers_mistake(node: Any, key: Key) -> None:
    tier = node.client()
    tier.put(key(1), b"x" * 100)
    with pytest.raises(ValueError, match="the payload has 100 bytes, the buffer 99"):
        tier.read_into(key(1), bytearray(99))
    assert tier.read_into(key(1), bytearray(100)) == 100, "and the connection goes on"
    assert node.server.num_connections == 2


def test_a_chunk_larger_than_the_server_takes_is_not_sent(node: Any, key: Key) -> None:
    tier = node.client()
    assert not tier.put(key(1), bytes((1 << 18) + 1))
    assert tier.put(key(1), bytes(1 << 18))
    assert (tier.stats.refused, tier.stats.errors) == (1, 0)


def test_the_writers_checksum_reaches_the_reader(node: Any, key: Key) -> None:
    """A bit that flips in the server's memory is a miss at the client, and the chunk is dropped for all."""
    tier = node.client()
    tier.put(key(1), b"x" * 100)
    node.tier._chunks[key(1)].payload[50] ^= 1
    assert tier.get(key(1)) is None
    assert tier.stats.corrupt == 1 and tier.quarantine.counts["corrupt"] == 1
    assert key(1) not in node.tier
    assert tier.put(key(1), b"x" * 100) and tier.get(key(1)) == b"x" * 100


@pytest.mark.parametrize("damage", [0, 9, 20, 30, 120, 130, 200])
def test_a_chunk_that_arrives_damaged_is_not_kept(node: Any, key: Key, wire: Wire, damage: int) -> None:
    raw = node.raw()
    raw.hello()
    chunk = bytearray(wire(key(1), b"x" * 100))
    chunk[damage] ^= 4
    raw.send(msg.encode_request(2, msg.Put(key(1)), len(chunk)), bytes(chunk))
    assert raw.reply()[0] == msg.Count(0)
    assert node.metric("paceline_kvserver_corrupt_chunks_total") == 1 and len(node.tier) == 0
    good = wire(key(1), b"x" * 100)
    raw.send(msg.encode_request(3, msg.Put(key(1)), len(good)), good)
    assert raw.reply()[0] == msg.Count(1), "the connection goes on"


def test_another_chunk_than_the_one_named_is_not_kept(node: Any, key: Key, wire: Wire) -> None:
    raw = node.raw()
    raw.hello()
    chunk = wire(key(2), b"x")
    raw.send(msg.encode_request(2, msg.Put(key(1)), len(chunk)), chunk)
    assert raw.reply()[0] == msg.Count(0) and len(node.tier) == 0


def test_requests_sent_ahead_are_answered_in_order(node: Any, key: Key, wire: Wire) -> None:
    raw = node.raw()
    raw.hello()
    payloads = {number: bytes([number]) * 5000 for number in range(20)}
    frames: list[bytes] = []
    for number, payload in payloads.items():
        chunk = wire(key(number), payload)
        frames.append(msg.encode_request(100 + number, msg.Put(key(number)), len(chunk)) + chunk)
        frames.append(msg.encode_request(200 + number, msg.Get(key(number), 10**6, 5000)))
    raw.send(*frames)
    for number, payload in payloads.items():
        assert raw.reply() == (msg.Count(1), b"", 100 + number)
        reply, chunk, request_id = raw.reply()
        assert (reply, request_id) == (msg.Hit(), 200 + number)
        assert chunk == wire(key(number), payload)


@pytest.mark.parametrize("token", ["", "wrong", "secre", "secret!"])
def test_nobody_is_let_in_without_the_token(start: Callable[..., Any], key: Key, token: str) -> None:
    node = start(token="secret")
    raw = node.raw()
    fail = raw.hello(token)
    assert isinstance(fail, msg.Fail) and fail.reason is Reason.UNAUTHORIZED and "--token-file" in fail.message
    assert raw.ended()
    tier = node.client(token=token)
    assert not tier.put(key(1), b"x") and tier.get(key(1)) is None and tier.stats.errors == 2
    assert node.client(token="secret").put(key(1), b"x")


def test_the_first_frame_must_be_a_hello(start: Callable[..., Any], key: Key) -> None:
    node = start(token="secret")
    node.tier.put(key(1), b"x")
    for request in (msg.Get(key(1), 100, 5000), msg.Delete(key(1)), msg.Stats()):
        raw = node.raw()
        raw.send(msg.encode_request(1, request))
        fail, payload, _ = raw.reply()
        assert isinstance(fail, msg.Fail) and fail.reason is Reason.BAD_FRAME and payload == b""
        assert raw.ended()
    assert key(1) in node.tier


def test_a_stranger_can_make_the_server_read_little(start: Callable[..., Any]) -> None:
    node = start(token="secret")
    raw = node.raw()
    raw.send(Head(msg.Op.HELLO, 1, 5000, 0).to_bytes())
    fail = raw.reply()[0]
    assert isinstance(fail, msg.Fail) and "the limit is 4096" in fail.message
    raw = node.raw()
    raw.send(Head(msg.Op.HELLO, 1, 100, 1).to_bytes())
    fail = raw.reply()[0]
    assert isinstance(fail, msg.Fail) and "payload of 1 bytes, the limit is 0" in fail.message


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nhost: somewhere\r\n\r\n", "magic number"),
        (Head(msg.Op.PUT, 2, 0, (1 << 18) + 129).to_bytes(), "the limit is 262272"),
        (Head(msg.Op.GET, 2, 10**6, 0).to_bytes(), "bytes of fields, the limit is"),
        (Head(77, 2, 0, 0).to_bytes(), "kind 77 is no request"),
        (msg.encode_request(2, msg.Stats(), 5) + b"12345", "request stats has no payload"),
        (msg.encode_request(2, msg.Put(ChunkKey(bytes(32), bytes(32), 1)), 5) + b"12345", "too few for a chunk's"),
        (msg.encode_request(2, msg.Hello()), "a second hello"),
    ],
)
def test_a_bad_frame_ends_its_connection_with_a_reason_and_no_other(
    node: Any, key: Key, frame: bytes, complaint: str
) -> None:
    other = node.client()
    other.put(key(1), b"x")
    raw = node.raw()
    raw.hello()
    raw.send(frame)
    fail, _, request_id = raw.reply()
    assert isinstance(fail, msg.Fail) and fail.reason is Reason.BAD_FRAME and complaint in fail.message
    assert request_id == 0 and raw.ended()
    assert other.get(key(1)) == b"x" and other.stats.errors == 0
    assert node.metric("paceline_kvserver_connections_closed_total", reason="bad_frame") == 1


def test_random_frames_hurt_nobody(node: Any, key: Key, wait: Wait) -> None:
    other = node.client()
    other.put(key(1), b"x" * 1000)
    dice = random.Random(7)
    good = [
        msg.encode_request(2, request, 0)
        for request in (
            msg.Get(key(1), 5000, 5000),
            msg.Contains((key(1),), 5000),
            msg.Keys(True),
            msg.Pin("a", (key(1),), 50),
        )
    ]
    for _ in range(150):
        raw = node.raw()
        raw.hello()
        frame = bytearray(dice.choice(good) + dice.randbytes(dice.randrange(60)))
        for _ in range(dice.randrange(1, 4)):
            frame[dice.randrange(len(frame))] = dice.randrange(256)
        raw.send(bytes(frame[: dice.randrange(1, len(frame) + 1)]))
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.ended()
        raw.close()
    wait("all gone", lambda: node.server.num_connections <= 2)
    assert other.get(key(1)) == b"x" * 1000 and other.stats.errors == 0
    wait("no leases", lambda: node.tier.num_leased == 0)
    wait("no pins", lambda: node.store.pinned == Pinned(0, 0))
    node.tier.check_integrity()


def test_a_client_that_takes_nothing_is_cut_off_and_its_lease_ends(
    start: Callable[..., Any], key: Key, wait: Wait
) -> None:
    node = start(capacity=64 << 20, chunk_bytes=32 << 20, inflight_bytes=32 << 20, frame_timeout_s=0.3)
    node.tier.put(key(1), bytes(32 << 20))
    raw = node.raw()
    raw.hello()
    raw.send(msg.encode_request(2, msg.Get(key(1), 2**40, 5000)))
    wait("it is cut off", lambda: node.metric("paceline_kvserver_connections_closed_total", reason="slow") == 1)
    assert node.tier.stats.hits == 1, "it was leased"
    wait("nothing is leased", lambda: node.tier.num_leased == 0)


def test_a_client_that_sends_half_a_chunk_is_cut_off_and_its_memory_comes_back(
    start: Callable[..., Any], key: Key, wait: Wait
) -> None:
    node = start(frame_timeout_s=0.3, inflight_wait_s=0.01)
    raw = node.raw()
    raw.hello()
    raw.send(msg.encode_request(2, msg.Put(key(1)), 1 << 18), bytes(1000))
    fail = raw.reply()[0]
    assert isinstance(fail, msg.Fail) and fail.reason is Reason.SLOW and "limit is 0.3 s a frame" in fail.message
    wait("memory is back", lambda: node.metric("paceline_kvserver_receiving_bytes") == 0)


def test_a_trickle_does_not_keep_a_connection(start: Callable[..., Any], key: Key) -> None:
    node = start(frame_timeout_s=0.3)
    raw = node.raw()
    raw.hello()
    frame = msg.encode_request(2, msg.Put(key(1)), 1 << 18) + bytes(1 << 18)

    def trickle() -> None:
        try:
            for byte in frame:
                raw.sock.send(bytes([byte]))
        except OSError:
            pass

    sender = threading.Thread(target=trickle, daemon=True)
    # A byte at a time is still fast; what matters is that each byte doesn't start the time anew.
    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender.start()
    assert raw.ended()
    sender.join()


def test_a_silent_stranger_is_sent_away(start: Callable[..., Any]) -> None:
    assert start(hello_timeout_s=0.1).raw().ended()


def test_an_idle_client_is_sent_away(start: Callable[..., Any]) -> None:
    client = start(idle_timeout_s=0.1).raw()
    assert isinstance(client.hello(), msg.Welcome)
    assert client.ended()


def test_connections_that_ended_while_idle_are_replaced(node: Any, key: Key, wait: Wait) -> None:
    tier = node.client()
    assert tier.put(key(1), b"x") and tier.get(key(1)) == b"x"
    for connection in list(node.server._connections):
        connection.stop()
    wait("they ended", lambda: node.server.num_connections == 0)
    assert tier.get(key(1)) == b"x" and tier.put(key(2), b"y") and tier.stats.errors == 0


def test_one_client_too_many_is_told_so(start: Callable[..., Any], wait: Wait) -> None:
    node = start(connections=2)
    first, second = node.raw(), node.raw()
    assert isinstance(first.hello(), msg.Welcome) and isinstance(second.hello(), msg.Welcome)
    third = node.raw()
    fail = third.reply()[0]
    assert isinstance(fail, msg.Fail) and fail.reason is Reason.FULL and third.ended()
    first.close()
    wait("there is room", lambda: node.server.num_connections == 1)
    assert isinstance(node.raw().hello(), msg.Welcome)


def test_puts_beyond_the_memory_for_them_are_refused_not_queued(
    start: Callable[..., Any], key: Key, wait: Wait
) -> None:
    node = start(inflight_bytes=1 << 18, inflight_wait_s=0.01)
    slow = node.raw()
    slow.hello()
    slow.send(msg.encode_request(2, msg.Put(key(1)), (1 << 18) + codec.HEADER_BYTES), bytes(codec.HEADER_BYTES + 1))
    tier = node.client()
    wait("it holds memory", lambda: node.metric("paceline_kvserver_receiving_bytes") > 0)
    assert not tier.put(key(2), bytes(1 << 18)) and tier.stats.errors == 0
    slow.sock.close()
    wait("memory is back", lambda: node.metric("paceline_kvserver_receiving_bytes") == 0)
    assert tier.put(key(2), bytes(1 << 18)), "the refused payload was skipped, so the connection goes on"


def test_an_abort_storm_leaves_no_lease_no_pin_and_no_memory(start: Callable[..., Any], key: Key, wait: Wait) -> None:
    node = start(capacity=16 << 20, chunk_bytes=4 << 20, inflight_bytes=16 << 20)
    node.tier.put(key(1), bytes(4 << 20))
    dice = random.Random(3)
    requests = (
        msg.encode_request(3, msg.Get(key(1), 2**40, 5000)),
        msg.encode_request(3, msg.Put(key(2)), 4 << 20) + bytes(10_000),
        msg.encode_request(3, msg.Get(key(1), 2**40, 5000))[: HEAD_BYTES + 5],
    )

    def abort(number: int) -> None:
        raw = node.raw()
        raw.hello()
        raw.send(msg.encode_request(2, msg.Pin(f"request-{number}", (key(1),), 200)), requests[number % 3])
        raw.inbox.read(dice.randrange(1, 20), 2**31)
        raw.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(abort, range(60)))
    wait("all gone", lambda: node.server.num_connections == 0)
    wait("no pins", lambda: node.store.pinned == Pinned(0, 0))
    wait("no leases", lambda: node.tier.num_leased == 0)
    assert node.metric("paceline_kvserver_receiving_bytes") == 0
    node.tier.check_integrity()


def test_a_pin_outlives_its_client_and_anybody_who_knows_its_name_ends_it(node: Any, key: Key) -> None:
    giver, taker = node.client(), node.client()
    giver.put(key(1), b"x" * PAGE)
    assert giver.pin("transfer-7", [key(1), key(2)], 30) == 1, "what isn't there yet is held when it comes"
    assert giver.put(key(2), b"z" * PAGE)
    giver.close()
    assert taker.extend("transfer-7", 60) and not taker.extend("transfer-8", 60)
    for number in range(10, 600):
        node.tier.put(key(number), b"y")
    assert taker.get(key(1)) == b"x" * PAGE and taker.get(key(2)) == b"z" * PAGE
    assert taker.unpin("transfer-7") and not taker.unpin("transfer-7")
    assert node.store.pinned == Pinned(0, 0)
    for number in range(1000, 1600):
        node.tier.put(key(number), b"y")
    assert taker.contains([key(1)]) == 0


def test_a_pin_of_a_client_that_died_ends_with_its_time(node: Any, key: Key, wait: Wait) -> None:
    tier = node.client()
    tier.put(key(1), b"x" * PAGE)
    assert tier.pin("transfer-7", [key(1)], 0.1) == 1
    tier.close()
    wait("its pin is gone", lambda: node.store.pinned == Pinned(0, 0))


def test_a_pins_name_and_keys_are_bounded(node: Any, key: Key) -> None:
    tier = node.client()
    for name in ("", "x" * 129):
        with pytest.raises(ValueError, match="a holder's name has 1 to 128 bytes"):
            tier.pin(name, [key(1)], 1)
    with pytest.raises(ValueError, match="at most 4096 keys"):
        tier.pin("me", [key(number) for number in range(4097)], 1)


def test_many_threads_and_clients_see_only_whole_chunks(node: Any, key: Key) -> None:
    tiers = [node.client(read_connections=2, write_connections=1) for _ in range(3)]

    def work(seed: int) -> None:
        dice = random.Random(seed)
        tier = tiers[seed % 3]
        for _ in range(60):
            number = dice.randrange(40)
            if dice.random() < 0.4:
                tier.put(key(number), bytes([number]) * dice.choice((1, PAGE, 60_000)))
            else:
                payload = tier.get(key(number))
                assert payload is None or set(payload) <= {number}

    with ThreadPoolExecutor(9) as pool:
        list(pool.map(work, range(9)))
    assert sum(tier.stats.errors + tier.stats.corrupt for tier in tiers) == 0
    node.tier.check_integrity()


def test_a_drain_answers_what_was_asked_and_then_says_goodbye(node: Any, key: Key, wire: Wire, wait: Wait) -> None:
    node.tier.put(key(1), b"x" * 100)
    raw, idle = node.raw(), node.raw()
    raw.hello(), idle.hello()
    chunk = wire(key(2), b"y" * 1000)
    raw.send(msg.encode_request(2, msg.Put(key(2)), len(chunk)), chunk[:500])
    wait("the put is under way", lambda: node.metric("paceline_kvserver_receiving_bytes") > 0)
    done: list[bool] = []
    drain = threading.Thread(target=lambda: done.append(node.server.drain(10)))
    drain.start()
    fail = idle.reply()[0]
    assert isinstance(fail, msg.Fail) and fail.reason is Reason.DRAINING
    with pytest.raises(OSError, match=r"refused|reset|No such|closed"):
        node.raw().hello()
    raw.send(chunk[500:], msg.encode_request(3, msg.Get(key(1), 1000, 5000)))
    assert raw.reply()[0] == msg.Count(1)
    assert raw.reply()[1] == wire(key(1), b"x" * 100)
    fail = raw.reply()[0]
    assert isinstance(fail, msg.Fail) and fail.reason is Reason.DRAINING
    drain.join()
    assert done == [True] and key(2) in node.tier


def test_a_drain_has_a_limit(node: Any, key: Key, wait: Wait) -> None:
    raw = node.raw()
    raw.hello()
    raw.send(msg.encode_request(2, msg.Put(key(2)), 5000), bytes(200))
    wait("the put is under way", lambda: node.metric("paceline_kvserver_receiving_bytes") > 0)
    assert not node.server.drain(0.05)
    node.server.close()
    assert raw.ended() and node.server.num_connections == 0


def test_what_had_to_come_from_disk_is_kept_in_memory_for_its_tenant(tmp_path: Path, key: Key) -> None:
    document = {"memory": {"capacity": "1Mi"}, "disk": {"path": str(tmp_path / "kv"), "capacity": "8Mi"}}
    with closing(NodeStore(open_store(parse_settings(document)))) as store:
        for number in (1, 2):
            assert store.tier.put(key(number), b"x" * PAGE, tenant="acme", durable=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "kv.sock"))
    listener.listen()
    store = NodeStore(open_store(parse_settings(document)))
    server = NodeServer(store, [listener], CollectorRegistry())
    server.start()
    settings = parse_settings({"node": {"address": f"unix://{tmp_path / 'kv.sock'}"}, "reuse": "always"})
    with closing(server), closing(open_store(settings)) as engine:
        lookup = engine.lookup([key(1), key(2)])
        assert lookup.wait(60)
        fetch = engine.fetch(lookup.plan, 60, tenant="acme")
        assert fetch.wait(60) and [bytes(lease.payload) for _, lease in fetch.poll()] == [b"x" * PAGE] * 2
        assert engine.levels[0].tier.get(key(2)) == b"x" * PAGE, "it came from disk once"
        assert store.tier.flush()
        assert store.where([key(1), key(2)]) == [("memory", "disk")] * 2
        assert store.clear(tenant="acme").count == 4, "a purge finds the copies"
