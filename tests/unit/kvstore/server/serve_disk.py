"""A node server over the disk tier, as a process that tests kill: python serve_disk.py FOLDER SOCKET."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from paceline_kvstore.config import DiskSettings, StoreSettings
from paceline_kvstore.opening import open_store
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.store import NodeStore

if __name__ == "__main__":
    path = Path(sys.argv[2])
    path.unlink(missing_ok=True)
    store = NodeStore(open_store(StoreSettings(disk=DiskSettings(Path(sys.argv[1]), 64 << 20))))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    server = NodeServer(store, [listener], CollectorRegistry())
    server.start()
    threading.Event().wait()
