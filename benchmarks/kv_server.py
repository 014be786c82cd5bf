"""The node server over a Unix socket beside a raw socket copy between the same two processes."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

from kv_rounds import MIB, OURS, compare, measure, timed
from prometheus_client import CollectorRegistry
from report import Report

from paceline_kvstore import ChunkKey
from paceline_kvstore.config import StoreSettings
from paceline_kvstore.opening import open_store
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.store import NodeStore
from paceline_kvstore.tiers.remote import RemoteTier
from paceline_kvstore.wire import transport
from paceline_kvstore.wire.address import Address

CHUNKS = 16
"""Different buffers, so that neither side reads from the processor's cache."""
SIZES = (1 * MIB, 8 * MIB)
SOCKET = "raw socket"
SHARE = 0.7


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _serve(folder: Path, size: int, ready: Event) -> None:
    """The other process: our server, and a loop that sends and takes bare buffers."""
    store = NodeStore(open_store(StoreSettings(memory=4 * CHUNKS * size)))
    server = NodeServer(store, [_listener(folder / "ours")], CollectorRegistry())
    server.start()
    listener = _listener(folder / "raw")
    buffers = [memoryview(bytearray([number % 251]) * size) for number in range(CHUNKS)]
    ready.set()
    sock, _ = listener.accept()
    transport.tune(sock)
    while command := sock.recv(2):
        buffer = buffers[command[1]]
        if command[0] == 0:
            _send(sock, buffer)
        else:
            _receive(sock, buffer)
            sock.send(b"k")


def _send(sock: socket.socket, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[sock.send(buffer) :]


def _receive(sock: socket.socket, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[sock.recv_into(buffer, 0, socket.MSG_WAITALL) :]


Action = Callable[[], None]
"""Moves CHUNKS chunks."""


def _raw_actions(sock: socket.socket, size: int) -> tuple[Action, Action]:
    buffer = memoryview(bytearray(size))

    def get() -> None:
        for number in range(CHUNKS):
            sock.send(bytes([0, number]))
            _receive(sock, buffer)

    def put() -> None:
        for number in range(CHUNKS):
            sock.send(bytes([1, number]))
            _send(sock, buffer)
            sock.recv(1)

    return get, put


def _our_actions(tier: RemoteTier, size: int) -> dict[str, Action]:
    buffer = memoryview(bytearray(size))
    keys = [ChunkKey(b"n" * 32, number.to_bytes(32, "big"), 256) for number in range(CHUNKS)]

    def get() -> None:
        for key in keys:
            if tier.read_into(key, buffer) != size:
                raise RuntimeError("the server lost a chunk")

    def chain() -> None:
        if tier.read_many([(key, buffer) for key in keys]) != CHUNKS:
            raise RuntimeError("the server lost a chunk")

    def put() -> None:
        for number in range(CHUNKS):
            # Another key each time: one that is there already would not be stored again.
            keys[number] = ChunkKey(b"n" * 32, time.perf_counter_ns().to_bytes(32, "big"), 256)
            if not tier.put(keys[number], buffer):
                raise RuntimeError("the server did not keep a chunk")

    return {"put": put, "get": get, "chain": chain}


def server_section(report: Report, rounds: int) -> None:
    """Put and get: one chunk after the other. chain: gets sent ahead, as a prefix is loaded; raw: one after the other.

    Ours includes making and comparing checksums.
    """
    for size in SIZES:
        _chunks_of(report, rounds, size)


def _chunks_of(report: Report, rounds: int, size: int) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, ready = Path(name), context.Event()
        process = context.Process(target=_serve, args=(folder, size, ready), daemon=True)
        process.start()
        try:
            if not ready.wait(60):
                raise RuntimeError("the server did not start")
            raw_get, raw_put = _raw_actions(Address(path=str(folder / "raw")).connect(5), size)
            ours = _our_actions(RemoteTier(Address(path=str(folder / "ours"))), size)
            for _ in range(5):
                ours["put"]()  # The server's memory is touched once.
            raw = {"put": raw_put, "get": raw_get, "chain": raw_get}
            pids = [process.pid] if process.pid is not None else []
            for what, action in ours.items():
                actions = {OURS: timed(action), SOCKET: timed(raw[what])}
                measured = measure(actions, rounds, helpers=pids)
                case = f"node server, {size // MIB} MiB, {what}"
                compare(report, case, CHUNKS * size, measured, {} if what == "chain" else {SOCKET: SHARE})
        finally:
            process.kill()
            process.join()
