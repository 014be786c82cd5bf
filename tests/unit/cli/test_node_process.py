"""The process node with real processes: ready, crash and backoff, graceful end, nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline_cli.node import container as container_module
from paceline_cli.node import launcher as launcher_module
from paceline_cli.node.host import HostIsolation
from paceline_cli.node.node import ProcessNode
from paceline_cli.node.parse import parse_pod
from paceline_cli.node.pod import Pod
from paceline_cli.node.worker import NodeConfig

SERVER = """
import http.server, os, signal, sys, threading
home = sys.argv[1]
def note(text):
    with open(os.path.join(home, "notes"), "a") as f:
        f.write(text + "\\n")
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/stopping":
            note("preStop")
        if self.path == "/ready" and os.path.exists(os.path.join(home, "unready")):
            self.send_response(503)
        else:
            self.send_response(200)
        self.end_headers()
    def log_message(self, *a): pass
def term(*a):
    note("SIGTERM")
    if "stubborn" not in sys.argv:
        os._exit(0)
signal.signal(signal.SIGTERM, term)
server = http.server.ThreadingHTTPServer((os.environ["PACELINE_HOST"], int(os.environ["PACELINE_PORT_HTTP"])), H)
note("pid %d" % os.getpid())
print("serving", flush=True)
server.serve_forever()
"""


class Sink:
    """Keeps every report."""

    def __init__(self) -> None:
        self.reports: list[Mapping[str, Any]] = []
        self.ended: list[str] = []

    def status(self, key: tuple[str, str], uid: str, status: Mapping[str, Any]) -> None:
        self.reports.append(status)

    def gone(self, key: tuple[str, str], uid: str) -> None:
        self.ended.append(uid)

    @property
    def last(self) -> Mapping[str, Any]:
        return self.reports[-1] if self.reports else {}

    def condition(self, kind: str) -> str:
        return next((c["status"] for c in self.last.get("conditions", []) if c["type"] == kind), "")

    @property
    def state(self) -> Mapping[str, Any]:
        return self.last["containerStatuses"][0] if self.last else {"state": {}, "lastState": {}, "restartCount": 0}


class Content:
    """Secrets by name; filled by a test."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, bytes]] = {}

    async def secret(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        return self.objects.get(name)

    config_map = secret

    async def service_account_token(self, pod: Pod, audience: str, expiration: int) -> bytes:
        return b"token"


class World:
    """A node on a temporary directory."""

    def __init__(self, root: Path) -> None:
        self.sink, self.content, self.isolation = Sink(), Content(), HostIsolation()
        config = NodeConfig("laptop", root / "state", root / "logs", refresh_s=0.1)
        self.node = ProcessNode(config, isolation=self.isolation, content=self.content, sink=self.sink)
        self.home = root / "home"
        self.home.mkdir()

    @property
    def notes(self) -> list[str]:
        path = self.home / "notes"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def pid(self) -> int:
        return int(next(n for n in reversed(self.notes) if n.startswith("pid")).split()[1])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_module, "BACKOFF_FIRST_S", 0.05)


async def until(condition: Callable[[], object], limit_s: float = 40.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.02)


def wait_for(condition: Callable[[], object], limit_s: float = 40.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def pod(command: list[str], **container: Any) -> dict[str, Any]:
    spec = {
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 20,
        "containers": [
            {"name": "main", "command": command, "ports": [{"name": "http", "containerPort": 8000}], **container}
        ],
    }
    return {"metadata": {"name": "p", "namespace": "ns", "uid": "u1"}, "spec": spec}


def server(world: World, *flags: str, **container: Any) -> dict[str, Any]:
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    return pod([sys.executable, "-c", SERVER, str(world.home), *flags], **{"readinessProbe": probe, **container})


def deleted(manifest: dict[str, Any], grace: int) -> dict[str, Any]:
    meta = manifest["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace}
    return manifest | {"metadata": meta}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_ready_then_a_graceful_end_with_pre_stop_before_sigterm(world: World) -> None:
    async def main() -> None:
        hook = {"preStop": {"httpGet": {"path": "/stopping", "port": "http"}}}
        manifest = server(world, lifecycle=hook)
        world.node.apply(manifest)
        await until(lambda: world.sink.condition("Ready") == "True")
        status = world.sink.last
        assert status["phase"] == "Running"
        assert status["podIP"] == "127.0.0.1"
        assert world.sink.state["started"] is True
        count = len(world.sink.reports)
        world.node.apply(manifest)
        await asyncio.sleep(1.2)
        assert len(world.sink.reports) == count, "a report without a change"
        pid = world.pid()
        world.node.apply(deleted(manifest, 20))
        await until(lambda: world.sink.ended == ["u1"])
        assert world.notes[-2:] == ["preStop", "SIGTERM"]
        assert world.sink.state["state"]["terminated"]["exitCode"] == 0
        assert world.sink.last["phase"] == "Succeeded"
        assert not alive(pid)
        assert world.node.log_path("ns", "p", "main").read_text() == "serving\n"
        assert list(world.node.config.state_dir.glob("pods/*")) == []
        await world.node.stop()

    run(main())


def test_an_exec_hook_sees_the_container_and_is_cut_at_the_grace_period(world: World) -> None:
    async def main() -> None:
        line = f'echo "hook $PACELINE_PORT_HTTP" >> {world.home}/notes; sleep 60; echo late >> {world.home}/notes'
        manifest = server(world, lifecycle={"preStop": {"exec": {"command": ["sh", "-c", line]}}})
        world.node.apply(manifest)
        await until(lambda: world.sink.condition("Ready") == "True")
        port = world.isolation.reserve(parse_pod(manifest)).port(8000)
        began = time.monotonic()
        world.node.apply(deleted(manifest, 1))
        await until(lambda: world.sink.ended == ["u1"])
        assert time.monotonic() - began > 0.9
        assert world.notes[-2:] == [f"hook {port}", "SIGTERM"]
        # SIGTERM came with time to act on it, although the hook had used up the grace period.
        assert world.sink.state["state"]["terminated"]["exitCode"] == 0
        await world.node.stop()

    run(main())


def test_readiness_follows_the_probe_and_does_not_restart(world: World) -> None:
    async def main() -> None:
        world.node.apply(server(world))
        await until(lambda: world.sink.condition("Ready") == "True")
        (world.home / "unready").touch()
        await until(lambda: world.sink.condition("Ready") == "False")
        (world.home / "unready").unlink()
        await until(lambda: world.sink.condition("Ready") == "True")
        assert world.sink.state["restartCount"] == 0
        await world.node.stop()

    run(main())


def test_a_stubborn_process_group_is_killed_after_the_grace_period(world: World) -> None:
    async def main() -> None:
        manifest = server(world, "stubborn")
        world.node.apply(manifest)
        await until(lambda: world.sink.condition("Ready") == "True")
        began = time.monotonic()
        world.node.apply(deleted(manifest, 1))
        await until(lambda: world.sink.ended == ["u1"])
        assert time.monotonic() - began > 0.9
        assert "SIGTERM" in world.notes
        assert world.sink.state["state"]["terminated"]["exitCode"] == 137
        await world.node.stop()

    run(main())


def test_a_second_stop_may_shorten_the_first(world: World) -> None:
    async def main() -> None:
        manifest = server(world, "stubborn")
        manifest["spec"]["terminationGracePeriodSeconds"] = 600  # Longer than this test may take.
        world.node.apply(manifest)
        await until(lambda: world.sink.condition("Ready") == "True")
        first = asyncio.ensure_future(world.node.stop())
        await until(lambda: "SIGTERM" in world.notes)
        await world.node.stop(grace=0)
        await first

    run(main())


def test_a_daemon_sets_pod_ends_after_those_that_may_need_it(world: World) -> None:
    async def main() -> None:
        daemon, user = server(world), server(world, lifecycle={"preStop": {"sleep": {"seconds": 1}}})
        owner = {"kind": "DaemonSet", "name": "kv", "controller": True}
        daemon["metadata"] |= {"name": "kv", "uid": "u0", "ownerReferences": [owner]}
        for manifest in (daemon, user):
            world.node.apply(manifest)
        await until(lambda: len([note for note in world.notes if note.startswith("pid")]) == 2)
        await world.node.stop()
        assert world.sink.ended == ["u1", "u0"]

    run(main())


def test_a_crash_is_reported_backed_off_and_restarted(world: World) -> None:
    async def main() -> None:
        program = f"print('boom'); open({str(world.home / 'notes')!r}, 'a').write('run\\n'); raise SystemExit(3)"
        world.node.apply(pod([sys.executable, "-c", program], terminationMessagePolicy="FallbackToLogsOnError"))
        await until(lambda: world.sink.state["restartCount"] >= 2)
        waits = [r["containerStatuses"][0]["state"].get("waiting", {}) for r in world.sink.reports]
        messages = [w["message"] for w in waits if w.get("reason") == "CrashLoopBackOff"]
        assert [m.split()[1] for m in messages][:2] == ["0.05s", "0.1s"]
        last = world.sink.state["lastState"]["terminated"]
        assert (last["exitCode"], last["reason"]) == (3, "Error")
        assert last["message"].endswith("boom\n")
        assert world.sink.last["phase"] == "Running"
        await world.node.stop(grace=0)

    run(main())


def test_a_failed_liveness_probe_restarts_the_container(world: World) -> None:
    async def main() -> None:
        probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
        world.node.apply(server(world, livenessProbe=probe | {"initialDelaySeconds": 1}))
        await until(lambda: world.sink.condition("Ready") == "True")
        first = world.pid()
        (world.home / "unready").touch()
        await until(lambda: "SIGTERM" in world.notes)
        (world.home / "unready").unlink()
        await until(lambda: world.sink.state["restartCount"] == 1 and world.sink.condition("Ready") == "True")
        assert world.pid() != first
        await world.node.stop()

    run(main())


def test_startup_holds_back_readiness(world: World) -> None:
    async def main() -> None:
        gate = world.home / "go"
        startup = {"exec": {"command": ["test", "-e", str(gate)]}, "periodSeconds": 1, "failureThreshold": 60}
        world.node.apply(server(world, startupProbe=startup))
        await until(lambda: "running" in world.sink.state["state"])
        await asyncio.sleep(1.2)
        assert (world.sink.state["started"], world.sink.condition("Ready")) == (False, "False")
        gate.touch()
        await until(lambda: world.sink.condition("Ready") == "True")
        await world.node.stop()

    run(main())


def test_init_containers_run_in_order_before_the_rest(world: World) -> None:
    async def main() -> None:
        manifest = server(world)
        notes = world.home / "notes"
        manifest["spec"]["initContainers"] = [
            {"name": name, "command": ["sh", "-c", f"echo {name} >> {notes}"]} for name in ("one", "two")
        ]
        world.node.apply(manifest)
        await until(lambda: world.sink.condition("Ready") == "True")
        assert world.notes[:2] == ["one", "two"]
        assert world.notes[2].startswith("pid")
        await world.node.stop()

    run(main())


def test_volumes_are_mounted_by_rewriting_and_follow_the_secret(world: World) -> None:
    async def main() -> None:
        manifest = pod(
            ["sh", "-c", 'while :; do cat "$0" > "$1/copy" 2>/dev/null; sleep 0.05; done', "/secrets/token", "/data"],
            volumeMounts=[
                {"name": "s", "mountPath": "/secrets", "readOnly": True},
                {"name": "d", "mountPath": "/data"},
            ],
        )
        manifest["spec"]["volumes"] = [
            {"name": "s", "secret": {"secretName": "internal"}},
            {"name": "d", "emptyDir": {}},
        ]
        world.node.apply(manifest)
        await until(lambda: "not found" in world.sink.state["state"].get("waiting", {}).get("message", ""))
        world.content.objects["internal"] = {"token": b"first"}
        copy = world.node.config.state_dir / "pods" / "u1" / "d" / "copy"
        await until(lambda: copy.exists() and copy.read_text() == "first")
        world.content.objects["internal"] = {"token": b"second"}
        await until(lambda: copy.read_text() == "second")
        await world.node.stop(grace=0)

    run(main())


def test_an_empty_dir_over_its_limit_evicts_the_pod(world: World) -> None:
    async def main() -> None:
        manifest = pod(
            ["sh", "-c", 'head -c 3000000 /dev/zero > "$0/big"; exec sleep 60', "/data"],
            volumeMounts=[{"name": "d", "mountPath": "/data"}],
        )
        manifest["spec"]["volumes"] = [{"name": "d", "emptyDir": {"sizeLimit": "1Mi"}}]
        world.node.apply(manifest)
        await until(lambda: world.sink.last.get("phase") == "Failed")
        assert world.sink.last["reason"] == "Evicted"
        assert '"d" exceeds the limit "1Mi"' in world.sink.last["message"]
        await world.node.stop(grace=0)

    run(main())


def test_a_pod_that_cannot_be_honoured_waits_and_says_why(world: World) -> None:
    async def main() -> None:
        manifest = server(world, tty=True)
        world.node.apply(manifest)
        await until(
            lambda: world.sink.reports and world.sink.state["state"]["waiting"]["reason"] != "ContainerCreating"
        )
        waiting = world.sink.state["state"]["waiting"]
        assert waiting["reason"] == "CreateContainerConfigError"
        assert waiting["message"].startswith("spec.containers[0].tty: ")
        assert world.sink.last["phase"] == "Pending"
        world.node.apply(deleted(manifest, 0))
        await until(lambda: world.sink.ended == ["u1"])

    run(main())


def test_a_program_that_is_not_installed_is_a_start_error(world: World) -> None:
    async def main() -> None:
        world.node.apply(pod(["no-such-program"]))
        await until(lambda: world.sink.state.get("lastState"))
        last = world.sink.state["lastState"]["terminated"]
        assert (last["reason"], last["exitCode"]) == ("StartError", 128)
        assert "no-such-program was not found" in last["message"]
        await world.node.stop(grace=0)

    run(main())


def test_logs_of_the_last_20_pods_are_kept_by_their_last_line(world: World) -> None:
    logs = world.node.config.log_dir
    for age in range(30):
        log = logs / f"ns_{age}" / "main.log"
        log.parent.mkdir()
        log.write_text("x")
        os.utime(log, (1e9 - age, 1e9 - age))
        # What tells is the log: its folder may be older, where a pod has run for long.
        os.utime(log.parent, (1e8 + age, 1e8 + age))

    async def main() -> None:
        world.node.apply(pod(["true"]))
        await until(lambda: world.sink.state.get("lastState"))
        await world.node.stop(grace=0)

    run(main())
    assert {path.name for path in logs.iterdir()} == {"ns_p", *(f"ns_{age}" for age in range(19))}


def test_a_container_ends_with_its_first_process(world: World) -> None:
    async def main() -> None:
        notes = world.home / "notes"
        manifest = pod(["sh", "-c", f"sleep 300 & echo pid $! >> {notes}; exit 0"])
        manifest["spec"]["restartPolicy"] = "Never"
        world.node.apply(manifest)
        await until(lambda: world.sink.last.get("phase") == "Succeeded")
        assert not alive(world.pid())
        await world.node.stop()

    run(main())


def test_only_the_first_process_gets_sigterm(world: World) -> None:
    """As in a container: a server that forwards the end to its workers in its own order must be able to."""

    async def main() -> None:
        notes = world.home / "notes"
        child = f"trap 'echo child >> {notes}; exit' TERM; echo up >> {notes}; while :; do sleep 0.05; done"
        parent = f"trap 'echo parent >> {notes}; sleep 0.3; exit 0' TERM; sh -c \"$0\" & while :; do sleep 0.05; done"
        manifest = pod(["sh", "-c", parent, child])
        world.node.apply(manifest)
        await until(lambda: world.notes == ["up"])
        world.node.apply(deleted(manifest, 10))
        await until(lambda: world.sink.ended == ["u1"])
        assert world.notes == ["up", "parent"]
        await world.node.stop()

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_process_dies_with_its_starter_even_without_the_guard() -> None:
    launcher = Path(launcher_module.__file__)
    program = (
        "import os, subprocess, sys, time\n"
        f"argv = [sys.executable, '-I', '-S', {str(launcher)!r}, str(os.getpid()), '-', 'sleep', '300']\n"
        "c = subprocess.Popen(argv)\n"
        "print(c.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        command = Path(f"/proc/{pid}/cmdline")
        wait_for(lambda: command.read_bytes().startswith(b"sleep"))
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(pid))


CRASHING_PARENT = """
import asyncio, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_node_process import World, server, until
async def main():
    world = World(Path(sys.argv[1]))
    # The grandchild is in the same group but not a child of the node.
    manifest = server(world)
    command = manifest["spec"]["containers"][0]["command"]
    notes = world.home / "notes"
    script = f'sleep 300 & echo "grandchild $!" >> {{notes}}; exec "$@"'
    manifest["spec"]["containers"][0]["command"] = ["sh", "-c", script, "sh", *command]
    world.node.apply(manifest)
    await until(lambda: world.sink.condition("Ready") == "True")
    print("up", flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


def test_a_killed_node_leaves_no_process(tmp_path: Path) -> None:
    program = textwrap.dedent(CRASHING_PARENT.format(here=str(Path(__file__).parent)))
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        notes = (tmp_path / "home" / "notes").read_text().split()
        pids = [int(word) for word in notes if word.isdigit()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids))
