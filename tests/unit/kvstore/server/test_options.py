"""Bad input to `paceline-kvstore serve` is one line that names the option, exit code 2, and leaves nothing bound."""

from __future__ import annotations

import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_kvstore.cli import app
from paceline_kvstore.server.options import BadInput, ServeOptions, bind_sockets


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to other machines and there is no --token-file"),
        (["--token-file", "/nonexistent", "--insecure"], "--insecure and --token-file are both given"),
        (["--tls-cert", "/nonexistent"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", "/nonexistent", "--tls-key", "/dev/null"], "--tls-key /dev/null: can't use them: [Errno 2]"),
        (["--token-file", "/nonexistent"], "can't read --token-file /nonexistent"),
        (["--token-file", "/dev/null"], "--token-file /dev/null is empty"),
        (
            ["--memory", "1Mi", "--max-chunk", "2Mi"],
            "--max-chunk 2097152 is more than any tier takes",
        ),
        (["--max-chunk", "2Mi", "--max-inflight", "1Mi"], "--max-inflight 1048576 has no room for one chunk"),
        (["--memory", "0"], "--memory 0 is too little: 65536 bytes or more"),
        (["--max-chunk", "0"], "--max-chunk must be at least 1"),
        (["--max-pinned", "2Gi"], "--max-pinned 2147483648 is more than the smaller of memory and disk, 1073741824"),
        (["--config", "/nonexistent"], "can't read --config /nonexistent: No such file or directory"),
        (["--config", "/dev/null"], "--config /dev/null isn't JSON"),
        (["--config", "/dev/null", "--memory", "1Gi"], "--memory and --config are both given: write memory.capacity"),
        (["--config", "/dev/null", "--ttl", "1h"], "--ttl and --config are both given: write ttl into the file"),
        (["--max-connections", "0"], "Invalid value for '--max-connections'"),
        (["--ttl", "0s"], "--ttl must be more than 0 s"),
        (["--frame-timeout", "0s"], "--frame-timeout must be more than 0 s"),
        (["--max-pin-time", "0s"], "--max-pin-time must be more than 0 s and at most 1 h"),
        (["--max-pin-time", "2h"], "--max-pin-time must be more than 0 s and at most 1 h"),
        (["--idle-timeout", "0s"], "--idle-timeout must be more than 0 s"),
        (["--socket", "/" + "x" * 200], "longer than 107 bytes"),
        (["--socket", "/nonexistent/kv.sock"], "can't listen on --socket /nonexistent/kv.sock"),
        (["--socket", "/dev/null"], "/dev/null is there already and no socket"),
        (["--memory", "lots"], "'lots' is not a quantity"),
        (["--ttl", "long"], "'long' is not a duration"),
        (["--log-level", "loud"], "'loud' is not one of debug, info, warning, error"),
    ],
)
def test_bad_input_is_named(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--admin-port", "0", "--port", "0", *arguments], terminal_width=200)
    assert done.exit_code == 2 and complaint in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("[]", "settings: [] is not an object"),
        ("{}", "memory, disk, node, s3: no tier is set"),
        ('{"memory": {"capacity": "1Mi"}, "node": {"address": "tcp://h:1"}}', "node: a node server shares tiers"),
        ('{"memory": {"capacity": "1Mi"}, "ttl": -1}', "ttl: -1 is not a number of seconds above 0"),
        ('{"disk": {"path": "/dev/null/kv", "capacity": "8Mi"}}', "/dev/null/kv"),
        (
            '{"disk": {"path": "/tmp/kv", "capacity": "8Mi"}, "encryptionKeyFile": "/nonexistent"}',
            "encryptionKeyFile",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, document: str, complaint: str) -> None:
    path = tmp_path / "kv.json"
    path.write_text(document)
    given = ["serve", "--admin-port", "0", "--port", "0", "--config", str(path)]
    done = CliRunner().invoke(app, given, terminal_width=200)
    assert done.exit_code == 2 and complaint in done.output and "Traceback" not in done.output


def options(tmp_path: Path) -> ServeOptions:
    return ServeOptions(
        config=None, memory=1 << 20, socket=tmp_path / "kv.sock", host="127.0.0.1", port=0, admin_port=0,
        token_file=None, insecure=False, tls_cert=None, tls_key=None, ttl=None, max_chunk=1 << 20,
        max_inflight=1 << 20, max_connections=4, max_pinned=0, max_pin_time=1.0, frame_timeout=1.0,
        idle_timeout=1.0, drain_timeout=1.0,
    )  # fmt: skip


def test_a_unix_socket_is_its_owners_alone_and_goes_away(tmp_path: Path) -> None:
    asked = options(tmp_path)
    sockets = bind_sockets(asked)
    assert asked.socket is not None and stat.S_IMODE(asked.socket.stat().st_mode) == 0o600
    sockets.close()
    assert not asked.socket.exists()


def test_a_server_takes_away_only_its_own_socket(tmp_path: Path) -> None:
    asked = options(tmp_path)
    first = bind_sockets(asked)
    first.clients[-1].close()
    second = bind_sockets(asked)
    first.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(asked.socket))
    second.close()


def test_a_taken_address_is_named_and_the_others_are_given_back(tmp_path: Path) -> None:
    first = bind_sockets(options(tmp_path))
    port = first.clients[0].getsockname()[1]
    with pytest.raises(BadInput, match=f"port {port} on 127.0.0.1 is already in use: free it or give another --port"):
        bind_sockets(replace(options(tmp_path), port=port))
    with pytest.raises(BadInput, match="another server listens on --socket"):
        bind_sockets(options(tmp_path))
    first.close()
    bind_sockets(replace(options(tmp_path), port=port)).close()


def test_clients_need_an_address(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither --socket nor --port"):
        bind_sockets(replace(options(tmp_path), socket=None, port=None))
