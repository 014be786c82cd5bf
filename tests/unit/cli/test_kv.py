"""`paceline kv` on real folders and a real S3 server: what is shown, what is removed, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline_cli.main import main
from paceline_kvstore.config import StoreSettings
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.opening import open_store
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.server.node_server import NodeServer
from paceline_kvstore.server.store import NodeStore
from paceline_kvstore.tiers import DiskTier
from paceline_kvstore.tiers.remote import RemoteTier
from paceline_kvstore.tiers.s3 import open_s3
from paceline_kvstore.wire.address import parse_address
from paceline_kvstore.wire.tls import ServerTls

PAYLOAD = bytes(5000)
CAPACITY = 8 << 20


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


Kv = Callable[..., Result]


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kv:
    """Runs `paceline kv` in this process, as its entry point would."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["paceline", "kv", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return Result(int(ended.value.code or 0), out.out, out.err)

    return run


def _keys(namespace: int, count: int) -> list[ChunkKey]:
    return [ChunkKey(bytes([namespace]) * 32, number.to_bytes(32, "big"), 16) for number in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three chunks of one model for one tenant, two of another."""
    tier = DiskTier(tmp_path / "kv", CAPACITY)
    for key in _keys(0xAA, 3):
        assert tier.put(key, PAYLOAD, tenant="acme")
    for key in _keys(0xBB, 2):
        assert tier.put(key, PAYLOAD)
    tier.close()
    return tmp_path / "kv"


def test_stats_and_ls_show_what_is_there(kv: Kv, folder: Path) -> None:
    facts = json.loads(kv("stats", folder, "--json").stdout)
    assert (facts["chunks"], facts["tokens"]) == (5, 80)
    assert facts["bytes"] > 5 * len(PAYLOAD)
    assert [(found["namespace"][:2], found["chunks"]) for found in facts["namespaces"]] == [("aa", 3), ("bb", 2)]
    assert "5 chunks, 80 tokens" in kv("stats", folder).stdout
    listed = [json.loads(line) for line in kv("ls", folder, "--namespace", "bb", "--json").stdout.splitlines()]
    assert {entry["chain"] for entry in listed} == {key.chain.hex() for key in _keys(0xBB, 2)}
    assert len(kv("ls", folder, "--limit", "2").stdout.splitlines()) == 2


def test_verify_finds_a_flipped_bit(kv: Kv, folder: Path) -> None:
    good = kv("verify", folder, "--json")
    assert (good.returncode, json.loads(good.stdout)["good"]) == (0, 5)
    segment = next(folder.glob("segment-*.kv"))
    data = bytearray(segment.read_bytes())
    data[4096 + 4096 + 100] ^= 1
    segment.write_bytes(data)
    bad = kv("verify", folder)
    assert bad.returncode == 1
    assert "1 bad" in bad.stdout and "segment-" in bad.stdout
    assert json.loads(kv("stats", folder, "--json").stdout)["chunks"] == 4


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--namespace", "aa"], {"bb": 2}),
        (["--keep", "aa"], {"aa": 3}),
        (["--tenant", "acme"], {"bb": 2}),
        (["--capacity", "64Ki"], None),
    ],
)
def test_gc_removes_what_is_named_for_good(
    kv: Kv, folder: Path, options: list[str], left: dict[str, int] | None
) -> None:
    result = kv("gc", folder, *options, "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(kv("stats", folder, "--json").stdout)
    if left is None:
        assert facts["bytes"] <= 64 << 10
        files = sum(path.stat().st_size for path in folder.glob("*.kv"))
        assert json.loads(result.stdout)["bytes"] == files <= 64 << 10
    else:
        assert {found["namespace"][:2]: found["chunks"] for found in facts["namespaces"]} == left
        assert json.loads(result.stdout)["removed"] == 5 - sum(left.values())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stats", "/no/such/folder"], "/no/such/folder: no such folder; check the path, or write s3://BUCKET/PREFIX"),
        (["stats", "EMPTY"], "EMPTY: no KV was ever stored here; give the folder of a disk tier"),
        (["gc", "FOLDER"], "nothing to remove is named: give --namespace, --keep, --tenant or --capacity"),
        (
            ["gc", "FOLDER", "--keep", "cc"],
            "there is no namespace that begins with cc; `paceline kv stats` lists them",
        ),
        (
            ["gc", "FOLDER", "--capacity", "5x"],
            "--capacity: '5x' is not a number of bytes: write one like 1048576 or 8Gi",
        ),
        (["gc", "FOLDER", "--capacity", "5"], "--capacity: it is at least 65536 bytes, not 5"),
        (
            ["gc", "s3://models", "--capacity", "5"],
            "--capacity is for folders; lifecycle rules bound a bucket",
        ),
        (
            ["ls", "FOLDER", "--namespace", "cc"],
            "there is no namespace that begins with cc; `paceline kv stats` lists them",
        ),
        (
            ["ls", "FOLDER", "--namespace", "model"],
            "--namespace model: it is hex digits; `paceline kv stats` lists namespaces",
        ),
        (["ls", "s3://No"], "s3://No: bucket 'No' is no bucket's name"),
        (["ls", "FOLDER", "--region", "x"], "FOLDER is a folder: --endpoint, --region, --credentials-dir, --ca-file"),
        (["bench", "FOLDER", "--chunk-size", "0"], "--chunk-size: a chunk has at least 1 byte"),
        (["bench", "FOLDER", "--chunks", "99999", "--chunk-size", "1T"], "FOLDER: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    kv: Kv, folder: Path, tmp_path: Path, arguments: list[str], line: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    names = {"FOLDER": str(folder), "EMPTY": str(empty)}
    result = kv(*(names.get(argument, argument) for argument in arguments))
    for name, path in names.items():
        line = line.replace(name, path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"paceline: {line}")
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_a_folder_in_use_is_left_alone(kv: Kv, folder: Path) -> None:
    tier = DiskTier(folder, CAPACITY)
    result = kv("gc", folder, "--namespace", "aa")
    assert result.returncode == 2 and f"in use by process {os.getpid()}" in result.stderr
    assert tier.contains(_keys(0xAA, 3)) == 3
    tier.close()


def test_bench_measures_and_leaves_nothing(kv: Kv, tmp_path: Path) -> None:
    result = kv("bench", tmp_path, "--chunks", "6", "--chunk-size", "64Ki", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["chunks"], facts["chunk_bytes"]) == (6, 64 << 10)
    assert facts["put"]["bytes_per_s"] > 0 and facts["get"]["p95_s"] >= facts["get"]["p50_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_cleans_up_a_bench(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline_cli.main", "kv", "bench", str(tmp_path), "--chunks", "100000"]
    process = subprocess.Popen([*command, "--chunk-size", "1"], stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".paceline-kv-bench-*/segment-*")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == "paceline: interrupted; nothing of this command is left behind\n"
    assert list(tmp_path.iterdir()) == []


def test_all_of_it_on_a_bucket(kv: Kv, s3_url: str, bucket: str) -> None:
    where = f"s3://{bucket}/kv"
    settings: dict[str, Any] = {"bucket": bucket, "prefix": "kv", "endpoint": s3_url}
    tier = open_s3(S3Settings(**settings, access_key="key", secret_key="secret"))
    for key in (*_keys(0xAA, 3), *_keys(0xBB, 2)):
        assert tier.put(key, PAYLOAD)
    assert tier.flush()
    tier.close()
    facts = json.loads(kv("stats", where, "--endpoint", s3_url, "--json").stdout)
    assert (facts["chunks"], len(facts["namespaces"])) == (5, 2) and facts["bytes"] > 5 * len(PAYLOAD)
    assert json.loads(kv("verify", where, "--endpoint", s3_url, "--json").stdout)["good"] == 5
    assert json.loads(kv("gc", where, "--endpoint", s3_url, "--keep", "bb", "--json").stdout)["removed"] == 3
    bench = kv("bench", where, "--endpoint", s3_url, "--chunks", "4", "--chunk-size", "10Ki", "--json")
    assert bench.returncode == 0, bench.stderr
    # The prefix above the bench's own, too: nothing of it is left.
    everything = json.loads(kv("stats", f"s3://{bucket}/kv", "--endpoint", s3_url, "--json").stdout)
    assert everything["chunks"] == 2


def test_all_of_it_on_a_node_server(kv: Kv, tmp_path: Path) -> None:
    socket = tmp_path / "kv.sock"
    command = [sys.executable, "-m", "paceline_kvstore.cli", "serve", "--memory", "16Mi", "--socket", str(socket)]
    with subprocess.Popen([*command, "--admin-port", "0"], stderr=subprocess.DEVNULL) as server:
        try:
            while not socket.exists():
                assert server.poll() is None
            where = f"unix://{socket}"
            tier = RemoteTier(parse_address(where))
            for key in (*_keys(0xAA, 3), *_keys(0xBB, 2)):
                assert tier.put(key, PAYLOAD)
            tier.close()
            assert (
                json.loads(kv("bench", where, "--chunks", "4", "--chunk-size", "10Ki", "--json").stdout)["chunks"] == 4
            )
            assert json.loads(kv("verify", where, "--json").stdout)["good"] == 5
            assert json.loads(kv("gc", where, "--namespace", "aa", "--json").stdout)["removed"] == 3
            facts = json.loads(kv("stats", where, "--json").stdout)
            assert facts["chunks"] == 2 and facts["bytes"] > 2 * len(PAYLOAD)
        finally:
            server.terminate()
    gone = kv("ls", where)
    assert gone.returncode == 1
    said = f"paceline: {where}: no KV server answers there, or it wants another --token-file or --ca-file\n"
    assert gone.stderr == said


def test_a_node_server_with_tls_wants_its_authority(kv: Kv, tmp_path: Path) -> None:
    tls = ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=kv", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(tls.key_file), "-out", str(tls.cert_file)]
    subprocess.run(command, check=True, capture_output=True)
    listener = create_server(("127.0.0.1", 0))
    where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    store = NodeStore(open_store(StoreSettings(memory=1 << 20)))
    with closing(NodeServer(store, [listener], CollectorRegistry(), tls=tls)) as server:
        server.start()
        assert store.tier.put(_keys(0xAA, 1)[0], PAYLOAD)
        assert json.loads(kv("stats", where, "--ca-file", tls.cert_file, "--json").stdout)["chunks"] == 1
        without, wrong = kv("stats", where), kv("stats", where, "--ca-file", tls.key_file)
    assert without.returncode == 1 and "it wants another --token-file or --ca-file" in without.stderr
    assert wrong.returncode == 2 and f"--ca-file: can't use {tls.key_file}" in wrong.stderr


def test_a_server_that_is_not_there_is_one_line(kv: Kv) -> None:
    result = kv("stats", "s3://models/kv", "--endpoint", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("paceline: s3://models/kv: ") and result.stderr.count("\n") == 1


def test_help_has_examples_and_loads_nothing_heavy(kv: Kv) -> None:
    result = kv("--help")
    assert result.returncode == 0 and "paceline kv verify" in result.stdout
    code = (
        "import sys, paceline_cli.main\n"
        "heavy = {'numpy', 'boto3', 'botocore', 'rich', 'torch', 'paceline_kvstore'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
