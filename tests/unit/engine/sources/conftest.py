"""A tiny model folder, a hub over HTTP for the real client, and a client of the real S3 server."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face model folder in two shards, with files that serving has no use for."""
    path = tmp_path / "model"
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("hello")
    (path / "pytorch_model.bin").write_bytes(b"never fetched")
    rng = np.random.default_rng(0)
    shards = {f"model-{i}-of-2.safetensors": {f"t{i}": rng.random((300, 200), np.float32)} for i in (1, 2)}
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@dataclass
class FakeHub:
    """What the Hub answers about one repository. A knob names a file and is used up by the next request for it."""

    files: dict[str, bytes]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    unavailable: int = 0
    cut: set[str] = field(default_factory=set)
    corrupt: set[str] = field(default_factory=set)
    always_corrupt: bool = False
    tokens: set[str] = field(default_factory=set)

    def info(self) -> dict[str, Any]:
        """GET /api/models/ORG/NAME/revision/REV?blobs=1."""
        siblings: list[dict[str, Any]] = []
        for name, data in self.files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name.endswith((".safetensors", ".gguf")):
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        return {"_id": "1", "id": "org/name", "modelId": "org/name", "sha": COMMIT, "private": False, "tags": [],
                "downloads": 0, "likes": 0, "siblings": siblings}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.hub
        hub.requests.append(f"{self.command} {self.path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.unavailable:
            hub.unavailable -= 1
            return self._send(503, b"busy")
        if match := re.fullmatch(r"/api/models/(org/\w+)/revision/([\w.-]+)(\?.*)?", self.path):
            if match[1] != "org/name":
                return self._send(404, b"{}", X_Error_Code="RepoNotFound")
            if match[2] not in ("main", COMMIT):
                return self._send(404, b"{}", X_Error_Code="RevisionNotFound")
            return self._send(200, json.dumps(hub.info()).encode(), Content_Type="application/json")
        match = re.fullmatch(rf"/(org/name/resolve|cdn)/{COMMIT}/(.*)", self.path)
        if match is None or match[2] not in hub.files:
            return self._send(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        return self._file(match[2], hub.files[match[2]], is_cdn=match[1] == "cdn")

    def _file(self, name: str, data: bytes, *, is_cdn: bool) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        if name.endswith((".safetensors", ".gguf")) and not is_cdn:
            return self._send(302, Location=f"{self.hub.url}/cdn/{COMMIT}/{name}", X_Repo_Commit=COMMIT,
                              X_Linked_Etag=f'"{sha256}"', X_Linked_Size=str(len(data)))  # fmt: skip
        begin = int(re.findall(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[0])
        body = data[begin:]
        if self.command == "GET" and (name in self.hub.corrupt or self.hub.always_corrupt) and is_cdn:
            self.hub.corrupt.discard(name)
            body = body[:-1] + bytes([body[-1] ^ 1])
        status = 206 if begin else 200
        headers = {"X_Repo_Commit": COMMIT, "ETag": f'"{sha256 if is_cdn else hashlib.sha1(data).hexdigest()}"'}
        if begin:
            headers["Content_Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and name in self.hub.cut and is_cdn:
            self.hub.cut.discard(name)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return None
        return self._send(status, body, **headers)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """org/name at COMMIT, behind $HF_ENDPOINT; the user's own cache is empty and retries don't wait."""
    fake = FakeHub({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": fake}))
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Retries follow at once; the pauses they would have made."""
    from paceline_engine.models import remote

    pauses: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A client of the S3 server, whose address and credentials the environment has."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = boto3.client("s3", region_name="us-east-1")
    deadline = time.monotonic() + 60
    while True:  # The gateway listens a moment before its filer serves.
        try:
            client.create_bucket(Bucket="models")
            return client
        except client.exceptions.BucketAlreadyExists:
            return client
        except client.exceptions.BucketAlreadyOwnedByYou:
            return client
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
