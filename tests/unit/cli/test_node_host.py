"""Host isolation: ports, paths and rights on a laptop; volume files on disk."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from paceline_cli.node.base import Command, Mount
from paceline_cli.node.host import HostIsolation, port_is_free, report_ports, rewrite
from paceline_cli.node.kept import KeptFolders
from paceline_cli.node.logs import LogFile, tail
from paceline_cli.node.pod import Container, Pod, PodRefused, Port, Volume, VolumeMount
from paceline_cli.node.volumes import File, write_files


def pod(uid: str, *containers: Container, volumes: tuple[Volume, ...] = ()) -> Pod:
    default = (Container("c", ("x",), ports=(Port("http", 8000), Port("admin", 8001))),)
    return Pod("ns", f"pod-{uid}", uid, {}, {}, "n", "sa", containers or default, volumes=volumes)


def test_ports_are_stable_for_a_pod_and_differ_between_pods() -> None:
    host = HostIsolation()
    one, two = host.reserve(pod("a")), host.reserve(pod("b"))
    assert host.reserve(pod("a")) is one
    ports = [one.port(8000), one.port(8001), two.port(8000), two.port(8001)]
    assert len(set(ports)) == 4
    assert all(port_is_free(port) for port in ports)


def test_a_port_that_somebody_listens_on_is_not_given_out() -> None:
    first = HostIsolation().reserve(pod("a")).port(8000)
    with socket.create_server(("127.0.0.1", first)):
        assert HostIsolation().reserve(pod("a")).port(8000) != first


def test_a_wanted_port_is_given_or_named_as_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        host = HostIsolation(fixed_port=lambda p, name: taken if name == "http" else None)
        with pytest.raises(OSError, match=f"port {taken} is taken"):
            host.reserve(pod("a"))
    assert host.reserve(pod("a")).port(8000) == taken
    # A second pod of the same role lives beside the first during a rollout.
    assert host.reserve(pod("b")).port(8000) != taken


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/var/cache", "/h/cache"),
        ("/var/cache/m/x", "/h/cache/m/x"),
        ("--dir=/var/cache/m", "--dir=/h/cache/m"),
        ("/var/cachet", "/var/cachet"),
        ("/var/cache/deep/f", "/h/deep/f"),
        ("x/var/cache", "x/var/cache"),
    ],
)
def test_paths_below_a_mount_are_rewritten(text: str, result: str) -> None:
    mounts = (Mount(Path("/h/cache"), "/var/cache", False), Mount(Path("/h/deep"), "/var/cache/deep", True))
    assert rewrite(text, mounts) == result


def test_command_is_looked_up_beside_python_and_secrets_of_the_shell_stay_out(tmp_path: Path) -> None:
    program = tmp_path / "paceline-engine"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environ = {"HOME": "/home/u", "AWS_SECRET_ACCESS_KEY": "s", "PATH": "/usr/bin"}
    host = HostIsolation(bin_dir=tmp_path, environ=environ)
    environment = host.reserve(pod("a"))
    command = environment.command(Container("c", ("x",)), Command(("paceline-engine",), {"A": "1"}), ())
    assert command.argv == (str(program),)
    assert command.env == {"HOME": "/home/u", "PATH": f"{tmp_path}:/usr/bin", "A": "1"}
    with pytest.raises(FileNotFoundError, match="no-such-program was not found in"):
        environment.command(Container("c", ("x",)), Command(("no-such-program",), {}), ())


def test_unknown_devices_are_refused() -> None:
    gpu = Container("c", ("x",), limits={"nvidia.com/gpu": "1", "memory": "1Gi"})
    with pytest.raises(PodRefused, match=r"spec.containers\[0\].resources.limits\[nvidia.com/gpu\]"):
        HostIsolation().check(pod("a", gpu))
    HostIsolation(devices=["nvidia.com/gpu"]).check(pod("a", gpu))


def test_a_stand_in_directory_replaces_the_empty_dir_at_its_mount_path(tmp_path: Path) -> None:
    mounts = (VolumeMount("cache", "/var/cache/paceline"), VolumeMount("tmp", "/tmp"))
    subject = pod(
        "a", Container("c", ("x",), mounts=mounts), volumes=(Volume("cache", "emptyDir"), Volume("tmp", "emptyDir"))
    )
    environment = HostIsolation(stand_ins={"/var/cache/paceline": tmp_path}).reserve(subject)
    assert environment.volume_path(subject, "cache") == tmp_path
    assert environment.volume_path(subject, "tmp") is None


DISK = (Volume("disk", "emptyDir"), Volume("tmp", "emptyDir"))


def test_a_kept_folder_is_one_pods_at_a_time_and_the_next_pod_has_what_is_in_it(tmp_path: Path) -> None:
    host = HostIsolation(kept=KeptFolders(tmp_path, frozenset({"disk"})))
    old, new = pod("a", volumes=DISK), pod("b", volumes=DISK)
    first = host.reserve(old).volume_path(old, "disk")
    assert first is not None
    (first / "chunk").write_text("kv")
    second = host.reserve(new).volume_path(new, "disk")
    # A rollout's new pod lives beside the old one.
    assert second not in (None, first)
    assert host.reserve(old).volume_path(old, "tmp") is None
    asyncio.run(host.teardown(old))
    third = pod("c", volumes=DISK)
    assert host.reserve(third).volume_path(third, "disk") == first
    assert (first / "chunk").read_text() == "kv"
    for one in (new, third):
        asyncio.run(host.teardown(one))


def test_the_folder_that_was_used_last_is_taken_first_and_never_another_runs(tmp_path: Path) -> None:
    one, other = (HostIsolation(kept=KeptFolders(tmp_path, frozenset({"disk"}))) for _ in range(2))
    pods = [pod(name, volumes=DISK) for name in "abc"]
    first = one.reserve(pods[0]).volume_path(pods[0], "disk")
    second = other.reserve(pods[1]).volume_path(pods[1], "disk")
    assert first != second
    asyncio.run(one.teardown(pods[0]))
    os.utime(f"{first}.lock", (2, 2))
    os.utime(f"{second}.lock", (1, 1))
    asyncio.run(other.teardown(pods[1]))
    assert one.reserve(pods[2]).volume_path(pods[2], "disk") == second
    asyncio.run(one.teardown(pods[2]))


def test_settings_in_a_config_map_name_what_is_here(tmp_path: Path) -> None:
    host = HostIsolation()
    environment = host.reserve(pod("a"))
    mounts = (Mount(tmp_path, "/var/lib/paceline/kv", False),)
    settings = {
        "disk": {"path": "/var/lib/paceline/kv/store"},
        "node": {"address": "tcp://shared-kv.ns.svc:7460"},
        "n": 1,
    }
    here = json.loads(environment.config("kv-store.json", json.dumps(settings).encode(), mounts))
    assert (here["disk"], here["n"]) == ({"path": f"{tmp_path}/store"}, 1)
    server = Container("s", ("x",), ports=(Port("kv", 7460), Port("admin", 7461)))
    kv_pod = Pod("ns", "p", "kv", {}, {}, "n", "shared-kv", (server,))
    port = host.reserve(kv_pod).port(7460)
    assert here["node"] == {"address": f"tcp://127.0.0.1:{port}"}
    asyncio.run(host.teardown(kv_pod))
    # The next pod of the server is where engines look for it.
    assert host.reserve(Pod("ns", "q", "kv2", {}, {}, "n", "shared-kv", (server,))).port(7460) == port
    assert environment.config("template.jinja", b"/var/lib/paceline/kv", mounts) == b"/var/lib/paceline/kv"
    assert environment.config("broken.json", b"{", mounts) == b"{"


def test_a_node_server_waits_for_its_port_while_another_has_it() -> None:
    host = HostIsolation()
    server = Container("s", ("x",), ports=(Port("kv", 7460),))
    port = int(host.reachable("tcp://shared-kv.ns.svc:7460").rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match=f"port {port} is still taken"):
        host.reserve(Pod("ns", "p", "kv", {}, {}, "n", "shared-kv", (server,)))


def test_the_reported_pod_names_the_real_ports() -> None:
    manifest = {
        "spec": {"containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 8000}]}, {"name": "d"}]}
    }
    environment = HostIsolation().reserve(pod("a"))
    reported = report_ports(manifest, environment)
    assert reported["spec"]["containers"][0]["ports"] == [{"name": "http", "containerPort": environment.port(8000)}]
    assert manifest["spec"]["containers"][0]["ports"][0]["containerPort"] == 8000


def test_volume_files_are_swapped_as_a_whole_and_private(tmp_path: Path) -> None:
    root = tmp_path / "v"
    assert write_files(root, {"a": File(b"1", 0o644), "d/b": File(b"2", 0o400)}, None)
    assert (root / "a").read_bytes() == b"1"
    assert (root / "a").stat().st_mode & 0o777 == 0o600
    assert (root / "d/b").stat().st_mode & 0o777 == 0o400
    assert not write_files(root, {"a": File(b"1", 0o644), "d/b": File(b"2", 0o400)}, None)
    with (root / "a").open() as reader:
        assert write_files(root, {"a": File(b"9", 0o644)}, None)
        assert reader.read() == "1"
    assert (root / "a").read_bytes() == b"9"
    assert sorted(p.name for p in root.iterdir() if not p.name.startswith("..")) == ["a"]


def test_a_log_is_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "c.log", bytes_max=100, files_max=3)
    for number in range(200):
        log.write(b"line %03d\n" % number)
    log.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["c.log", "c.log.1", "c.log.2"]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 3 * 110
    assert tail(tmp_path / "c.log").endswith("line 199\n")
