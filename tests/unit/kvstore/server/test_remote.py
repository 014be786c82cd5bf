"""The remote tier when the server is away, slow, wrong, or new: misses, counted, soon, and never an exception."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline_kvstore import ChunkKey, codec
from paceline_kvstore.remote.pool import Backoff
from paceline_kvstore.tiers import MemoryTier
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.wire import messages as msg
from paceline_kvstore.wire import transport
from paceline_kvstore.wire.address import Address, is_loopback, parse_address

Key = Callable[..., ChunkKey]
CHUNK = b"c" * 100


class Impostor:
    """Listens like a node server; `say` gets each connection after its hello was read."""

    def __init__(self, path: Path, say: Callable[[socket.socket], None]) -> None:
        self.address = Address(path=str(path))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._say = say
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        with sock:
            sock.recv(1000)
            try:
                self._say(sock)
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


OPEN: list[RemoteTier] = []


def connect(address: Address, options: RemoteOptions | None = None) -> RemoteTier:
    OPEN.append(RemoteTier(address, options))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def close_tiers() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Callable[[Callable[[socket.socket], None]], Impostor]]:
    made: list[Impostor] = []

    def make(say: Callable[[socket.socket], None]) -> Impostor:
        made.append(Impostor(tmp_path / "kv.sock", say))
        return made[-1]

    yield make
    for each in made:
        each.close()


def welcome(sock: socket.socket) -> None:
    sock.sendall(msg.encode_reply(1, msg.Welcome(10**9, 10**6)))


def every_call(tier: RemoteTier, key: ChunkKey) -> list[Any]:
    """What each method answers; all of it must mean "no"."""
    return [
        tier.get(key), tier.read_into(key, bytearray(200)), tier.lease(key), tier.contains([key]), tier.put(key, CHUNK),
        tier.delete(key), tier.clear(), list(tier.keys()), tier.flush(), tier.pin("me", [key], 1), tier.unpin("me"),
        tier.extend("me", 1), tier.bytes_used,
    ]  # fmt: skip


NO = [None, None, None, 0, False, False, 0, [], False, 0, False, False, 0]


@pytest.mark.parametrize("address", [Address(path="/nonexistent/kv.sock"), Address(host="127.0.0.1", port=1)])
def test_without_a_server_everything_is_a_miss(key: Key, address: Address) -> None:
    tier = connect(address)
    assert every_call(tier, key(1)) == NO
    assert tier.stats.errors == 13 and tier.stats.misses == 3 and tier.stats.refused == 1
    assert tier.capacity == 0


def reply_with(*frames: bytes) -> Callable[[socket.socket], None]:
    def say(sock: socket.socket) -> None:
        welcome(sock)
        while sock.recv(100_000):
            for frame in frames:
                sock.sendall(frame)

    return say


@pytest.mark.parametrize(
    "say",
    [
        lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100)),
        lambda sock: sock.sendall(msg.encode_reply(1, msg.Count(1))),
        lambda sock: welcome(sock),
        reply_with(b"\xff" * 64),
        reply_with(msg.encode_reply(77, msg.Count(0))),
        reply_with(msg.encode_reply(0, msg.Fail(msg.Reason.INTERNAL, "broken"))),
        reply_with(msg.encode_reply(2, msg.Hit(), 10) + bytes(10)),
        reply_with(msg.encode_reply(2, msg.Hit(), 10**5)),
        reply_with(msg.encode_reply(2, msg.Hit(), 10**15)),
        reply_with(msg.encode_reply(2, msg.Welcome(1, 1))),
    ],
)
def test_a_server_that_talks_nonsense_is_a_miss(impostor: Any, key: Key, say: Callable[[socket.socket], None]) -> None:
    tier = connect(impostor(say).address, RemoteOptions(read_deadline=0.2, write_deadline=0.2, backoff=1e-6))
    assert every_call(tier, key(1)) == NO
    assert tier.stats.errors == 13 and tier.stats.hits == 0


def test_a_silent_server_costs_the_deadline_and_no_more(impostor: Any, key: Key) -> None:
    release = threading.Event()
    fake = impostor(lambda _sock: release.wait(20))
    tier = connect(fake.address, RemoteOptions(read_deadline=30.0))
    assert tier.get(key(1), deadline=0.05) is None
    assert tier.contains([key(1)], deadline=0.05) == 0
    assert tier.read_into(key(1), bytearray(10), deadline=0.0) is None
    assert tier.stats.errors == 3
    release.set()


def test_a_foreign_chunk_is_a_miss_and_counted(node: Any, key: Key) -> None:
    tier = node.client()
    tier.put(key(1), CHUNK), tier.put(key(2), CHUNK)
    node.tier._chunks[key(1)] = node.tier._chunks[key(2)]
    assert tier.get(key(1)) is None and tier.get(key(2)) == CHUNK
    assert tier.quarantine.counts == {"foreign": 1, "corrupt": 0, "version": 0}
    assert (tier.stats.corrupt, tier.stats.misses, tier.stats.errors) == (1, 1, 0)
    assert key(1) not in node.tier, "nobody fetches it again"


def test_a_chain_is_read_in_one_go_up_to_the_first_that_is_missing(node: Any, key: Key) -> None:
    tier = node.client(read_connections=1)
    for number in range(20):
        node.tier.put(key(number), bytes([number]) * (1000 + number))
    buffers = [bytearray(2000) for _ in range(20)]
    wanted = [(key(number), buffer) for number, buffer in enumerate(buffers)]
    assert tier.read_many(wanted) == 20 and tier.read_many([]) == 0
    for number, buffer in enumerate(buffers):
        assert buffer[: 1000 + number] == bytes([number]) * (1000 + number)
    node.tier.delete(key(7))
    assert tier.read_many(wanted) == 7
    node.tier._chunks[key(3)].payload[0] ^= 1
    assert tier.read_many(wanted) == 3 and tier.stats.corrupt == 1
    with pytest.raises(ValueError, match="the payload has 1001 bytes, the buffer 5"):
        tier.read_many([(key(0), bytearray(2000)), (key(1), bytearray(5)), (key(2), bytearray(2000))])
    assert tier.read_many(wanted[:3]) == 3 and tier.stats.errors == 0, "the one connection goes on"
    node.server.close()
    assert tier.read_many(wanted) == 0 and tier.stats.errors == 1


def test_a_chain_shares_one_deadline(impostor: Any, key: Key) -> None:
    release = threading.Event()
    fake = impostor(lambda _sock: release.wait(20))
    tier = connect(fake.address)
    assert tier.read_many([(key(number), bytearray(10)) for number in range(9)], deadline=0.05) == 0
    assert (tier.stats.errors, tier.stats.misses) == (1, 9)
    release.set()


class Stalling:
    """Answers every get with one chunk, but the first one after `stalls` was set, until `release` is."""

    def __init__(self, key: ChunkKey) -> None:
        self.stalls, self.release = threading.Event(), threading.Event()
        chunk = bytes(codec.encode(key, CHUNK))
        self.answer = chunk[codec.HEADER_BYTES :] + chunk[: codec.HEADER_BYTES]

    def __call__(self, sock: socket.socket) -> None:
        welcome(sock)
        inbox = transport.Inbox(transport.PlainStream(sock))
        for request_id in itertools.count(2):
            head = inbox.head(1000, 0, time.monotonic() + 60)
            inbox.read(head.field_bytes, time.monotonic() + 60)
            if self.stalls.is_set():
                self.stalls.clear()
                self.release.wait(60)
            sock.sendall(msg.encode_reply(request_id, msg.Hit(), len(self.answer)) + self.answer)


def test_a_late_answer_is_asked_for_again_over_another_connection(impostor: Any, key: Key) -> None:
    say = Stalling(key(1))
    # With half of the gets there is always a second one left, however busy the machine made the first ones late.
    tier = connect(impostor(say).address, RemoteOptions(read_connections=2, read_deadline=60.0, hedge_share=0.5))
    for _ in range(40):
        assert tier.get(key(1)) == CHUNK
    for stall in range(1, 4):
        before = tier.race.num_won
        say.stalls.set()
        assert tier.get(key(1)) == CHUNK and tier.race.num_won == before + 1
        assert (tier.stats.hits, tier.stats.errors) == (40 + stall, 0)
    say.release.set()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: bytes(tier.get(key(1)) or b""), range(20))) == {CHUNK}, "no connection was lost"


def test_second_tries_have_a_bound_however_slow_the_server_is(impostor: Any, key: Key) -> None:
    def say(sock: socket.socket) -> None:
        welcome(sock)
        for request_id in itertools.count(2):
            sock.recv(1000)
            threading.Event().wait(0.005)
            sock.sendall(msg.encode_reply(request_id, msg.Miss()))

    tier = connect(impostor(say).address, RemoteOptions(read_connections=2, read_deadline=60.0, hedge_share=0.05))
    for _ in range(100):
        assert tier.get(key(1)) is None
    assert tier.race.num_hedges <= 5 and tier.stats.errors == 0


def test_a_server_that_is_away_is_not_asked_again_at_once(impostor: Any, key: Key) -> None:
    fake = impostor(lambda sock: sock.close())
    tier = connect(fake.address, RemoteOptions(backoff=60.0, backoff_max=60.0))
    for _ in range(50):
        assert tier.get(key(1)) is None
    assert fake.num_connections == 1 and tier.stats.errors == 50


def test_pauses_double_up_to_a_bound_and_end_with_success() -> None:
    backoff = Backoff(1.0, 10.0, chance=lambda: 0.0)
    now = 0.0
    for pause in (1, 2, 4, 8, 10, 10):
        backoff.failed(now)
        assert backoff.blocked(now + pause - 0.01) and not backoff.blocked(now + pause)
        now += pause
    backoff.succeeded()
    assert not backoff.blocked(now)
    backoff.failed(now)
    assert not backoff.blocked(now + 1)


def test_pauses_are_spread_by_chance() -> None:
    backoff = Backoff(1.0, 10.0, chance=lambda: 1.0)
    backoff.failed(0.0)
    assert backoff.blocked(0.49) and not backoff.blocked(0.5)


def test_busy_connections_bound_what_a_tier_asks_at_a_time(impostor: Any, key: Key) -> None:
    release = threading.Event()
    fake = impostor(lambda _sock: release.wait(20))
    tier = connect(fake.address, RemoteOptions(read_connections=2, read_deadline=0.5))
    threads = [threading.Thread(target=tier.get, args=(key(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    release.set()
    assert fake.num_connections <= 2 and tier.stats.errors == 8


def test_memory_for_payloads_is_reused_and_never_under_a_reader(start: Callable[..., Any], key: Key) -> None:
    node = start(capacity=4 << 20)
    tier = node.client(staging_bytes=8 * 4096)
    for number in range(32):
        node.tier.put(key(number), bytes([number]) * 4096)
    kept = [tier.get(key(number)) for number in range(32)]
    assert [payload[0] for payload in kept] == list(range(32))
    assert tier._staging.num_taken == 8
    del kept
    assert tier._staging.num_taken == 0


def test_what_a_client_got_survives_the_server(start: Callable[..., Any], key: Key) -> None:
    node = start()
    tier = node.client()
    tier.put(key(1), CHUNK)
    payload = tier.get(key(1))
    node.server.close()
    assert payload == CHUNK
    assert tier.get(key(1)) is None and tier.stats.errors == 1


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:///run/kv.sock", Address(path="/run/kv.sock")),
        ("tcp://127.0.0.1:7460", Address(host="127.0.0.1", port=7460)),
        ("tcp://[::1]:1", Address(host="::1", port=1)),
        ("tcp://kv.local:65535", Address(host="kv.local", port=65535)),
    ],
)
def test_an_address_is_written_as_it_is_read(text: str, address: Address) -> None:
    assert parse_address(text) == address and str(address) == text


@pytest.mark.parametrize(
    "text", ["", "kv", "unix://kv", "tcp://:1", "tcp://h:0", "tcp://h:65536", "tcp://h", "http://h:1"]
)
def test_another_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write tcp://HOST:PORT, or unix:///PATH"):
        parse_address(text)


def test_only_loopback_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.9.9.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "example.org", "")))


def test_a_tenants_name_that_is_too_long_is_the_callers_mistake(node: Any, key: Key) -> None:
    with pytest.raises(ValueError, match="at most 256 bytes"):
        node.client().put(key(1), b"x", tenant="t" * 257)


def test_it_has_the_shape_of_any_other_tier(node: Any) -> None:
    names = {name for name in dir(MemoryTier) if not name.startswith("_")} - {
        "check_integrity", "fill", "footprint", "num_leased", "origin", "parent", "payload_bytes",
    }  # fmt: skip
    assert names <= set(dir(node.client()))
