"""The command line: bad input is one line on stderr and exit code 2, with nothing left half-started."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline_cli.local.kubeconfig import write_kubeconfig
from paceline_router.cli import app
from paceline_router.serve import CannotListen, RouterConfig, listen

PORTS = ("--port", "0", "--admin-port", "0", "--metrics-port", "0")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    write_kubeconfig(path, "http://127.0.0.1:1", "token")
    return path


def refusal(*arguments: object) -> str:
    result: Result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--metrics-port"])
def test_a_busy_port_is_named_with_the_flag_that_moves_it(taken_port: int, kubeconfig: Path, option: str):
    line = refusal("--kubeconfig", kubeconfig, *PORTS, option, taken_port)
    assert line == (
        f"paceline-router: port {taken_port} on 127.0.0.1 is in use: "
        f"stop what listens there, or choose another with {option}"
    )


def test_a_failed_start_gives_back_the_ports_it_had_taken(taken_port: int):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with pytest.raises(CannotListen):
        listen(RouterConfig(namespace="n", port=free, admin_port=0, metrics_port=taken_port))
    socket.create_server(("127.0.0.1", free)).close()


def test_an_address_that_is_not_ours_is_named(kubeconfig: Path):
    line = refusal("--kubeconfig", kubeconfig, *PORTS, "--host", "192.0.2.1")
    assert "cannot listen on 192.0.2.1 port 0 (--port)" in line


def test_a_missing_or_empty_token_file_is_refused(tmp_path: Path, kubeconfig: Path):
    missing = tmp_path / "none"
    assert f"internal token file {missing} cannot be read" in refusal("--internal-token-file", missing)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert f"internal token file {empty} is empty" in refusal("--internal-token-file", empty)


def test_a_missing_kubeconfig_is_refused(tmp_path: Path):
    line = refusal("--kubeconfig", tmp_path / "none", *PORTS)
    assert f"no cluster configuration: {tmp_path / 'none'} does not exist" in line
    assert "pass --kubeconfig FILE" in line


BAD_CLUSTER = """\
current-context: a
contexts: [{name: a, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: 5}]
users: [{name: u, user: {}}]
"""


@pytest.mark.parametrize("text", [b"garbage: [", b"a: b", b"- 1", b"\x00\xff", b"", b"5", BAD_CLUSTER.encode()])
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, by: str):
    path = tmp_path / "config"
    path.write_bytes(text)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if by == "environment":
        monkeypatch.setenv("KUBECONFIG", str(path))
    line = refusal(*(["--kubeconfig", path] if by == "flag" else []), *PORTS)
    assert line.startswith("paceline-router: no cluster configuration: ")
    assert str(path) in line


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--drain-timeout", "soon", "'soon' is not a duration"), ("--log-level", "loud", "write one of debug")],
)
def test_a_bad_value_says_what_to_write(kubeconfig: Path, option: str, value: str, message: str):
    assert message in refusal("--kubeconfig", kubeconfig, *PORTS, option, value)


def test_help_lists_every_knob():
    text = CliRunner().invoke(app, ["--help"]).output
    for option in ("--namespace", "--port", "--admin-port", "--metrics-port", "--internal-token-file", "--kubeconfig"):
        assert re.search(rf"{option}\b", text)
