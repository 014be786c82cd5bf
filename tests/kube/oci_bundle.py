"""Pods under a real container runtime: the same isolation with an OCI bundle and runc in place of `sandbox_init.py`.

Why: the namespaces of `pod_isolation.py` are ours; runc's are what a cluster has. Both are made from one spec, so that
a Pod that starts here differs from one in a cluster by its image alone. The node kills runc, not the container, when a
grace period is over, so whatever runc left is removed before the next run and at the end of the Pod.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pod_isolation import NamespaceIsolation, Sandbox
from sandbox_rights import CLONE_NEWUSER, DENIED_CALLS

from paceline_cli.node.base import Command, Container, Mount, Pod

RUNC_TIMEOUT_S = 20
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_PARENT = "paceline-test"
NAMESPACES = ("pid", "ipc", "uts", "mount")
NO_SUID = ["nosuid", "noexec", "nodev"]
KERNEL_MOUNTS = (
    ("/proc", "proc", "proc", NO_SUID),
    ("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
    ("/dev/pts", "devpts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
    ("/dev/shm", "tmpfs", "shm", [*NO_SUID, "mode=1777", "size=65536k"]),
    ("/dev/mqueue", "mqueue", "mqueue", NO_SUID),
    ("/sys", "sysfs", "sysfs", [*NO_SUID, "ro"]),
)
# What container runtimes hide of the kernel's file systems.
MASKED = ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug"]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


@dataclass
class RuncSandbox(Sandbox):
    """A Pod whose containers runc runs. `running` maps a container's name to its current id."""

    running: dict[str, str] = field(default_factory=dict)

    def command(self, container: Container, command: Command, mounts: tuple[Mount, ...]) -> Command:
        spec = self.container_spec(container, command, mounts)
        if spec["exec"]:
            process = self.folder / f"{container.name}.{next(self.serial)}.process.json"
            _write(process, process_config(spec))
            return self._runc("exec", "--process", str(process), self.running.get(container.name, "none"))
        self.remove(container.name)
        identity = f"{self.folder.name[:13]}-{container.name}-{next(self.serial)}"
        bundle = self.folder / identity
        _make_root(bundle / "rootfs", spec["links"])
        _write(bundle / "config.json", bundle_config(spec, f"/{CGROUP_PARENT}/{identity}"))
        self.running[container.name] = identity
        return self._runc("run", "--bundle", str(bundle), identity)

    def remove(self, name: str) -> None:
        """End what is left of the container's last run."""
        identity = self.running.pop(name, None)
        if identity is not None:
            command = self._runc("delete", "--force", identity)
            subprocess.run(command.argv, capture_output=True, timeout=RUNC_TIMEOUT_S, check=False)
            shutil.rmtree(self.folder / identity, ignore_errors=True)

    def _runc(self, *arguments: str) -> Command:
        state = self.folder / "runc"
        runc = shutil.which("runc") or "runc"
        return Command((runc, "--root", str(state), *arguments), {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "/")


class RuncIsolation(NamespaceIsolation):
    """`Isolation` of the process node with runc as the container runtime."""

    sandbox_type = RuncSandbox

    async def teardown(self, pod: Pod) -> None:
        sandbox = self.sandboxes.get(pod.uid)
        if isinstance(sandbox, RuncSandbox):
            for name in list(sandbox.running):
                await asyncio.to_thread(sandbox.remove, name)
        await super().teardown(pod)


def bundle_config(spec: dict[str, Any], cgroup: str) -> dict[str, Any]:
    """config.json of an OCI bundle (runtime spec 1.0) for a container's `Sandbox.container_spec`."""
    mounts = [
        {"destination": destination, "type": kind, "source": source, "options": options}
        for destination, kind, source, options in KERNEL_MOUNTS
    ]
    mounts += [_bind(path, path, read_only=True) for path in spec["image"]]
    mounts += [_bind(source, target, read_only=False) for source, target in spec["files"]]
    volumes = sorted(spec["mounts"], key=lambda mount: mount["target"].count("/"))
    mounts += [_bind(m["source"], m["target"], read_only=m["read_only"]) for m in volumes]
    mounts += [_bind(path, path, read_only=True) for path in spec["covered"]]
    linux: dict[str, Any] = {
        "cgroupsPath": cgroup,
        "namespaces": [{"type": kind} for kind in NAMESPACES] + [{"type": "network", "path": spec["netns"]}],
        "maskedPaths": MASKED,
        "readonlyPaths": READ_ONLY,
        "rootfsPropagation": "rprivate",
    }
    if spec["rights"]["seccomp"]:
        linux["seccomp"] = _seccomp()
    return {
        "ociVersion": "1.0.2",
        "process": process_config(spec),
        "root": {"path": "rootfs", "readonly": spec["read_only_root"]},
        "hostname": spec["hostname"],
        "mounts": mounts,
        "linux": linux,
    }


def process_config(spec: dict[str, Any]) -> dict[str, Any]:
    """The `process` object of the runtime spec: of a container, or of a command run in it."""
    rights = spec["rights"]
    capabilities = [f"CAP_{name}" for name in rights["capabilities"]]
    return {
        "terminal": False,
        "user": {"uid": rights["uid"], "gid": rights["gid"], "additionalGids": rights["groups"]},
        "args": spec["argv"],
        "env": [f"{name}={value}" for name, value in spec["env"].items()],
        "cwd": spec["cwd"] or "/",
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        "noNewPrivileges": rights["no_new_privs"],
    }


def remove_cgroups() -> None:
    """Remove the empty control groups that runs cut short leave behind."""
    for parent in (*CGROUP_ROOT.glob(f"*/{CGROUP_PARENT}"), CGROUP_ROOT / CGROUP_PARENT):
        for group in sorted(parent.rglob("*/"), reverse=True):
            _remove_group(group)
        _remove_group(parent)


def _remove_group(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:
        # In use by another run, or gone.
        return


def _bind(source: str, target: str, *, read_only: bool) -> dict[str, Any]:
    options = ["rbind", "rprivate", "ro" if read_only else "rw"]
    return {"destination": target, "type": "bind", "source": source, "options": options}


def _seccomp() -> dict[str, Any]:
    refused = {"action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    user_namespace = {"index": 0, "value": CLONE_NEWUSER, "valueTwo": CLONE_NEWUSER, "op": "SCMP_CMP_MASKED_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            {"names": sorted(DENIED_CALLS)} | refused,
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
            {"names": ["clone"], "args": [user_namespace]} | refused,
        ],
    }


def _make_root(root: Path, links: dict[str, str]) -> None:
    for folder, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("run", 0o755), ("proc", 0o555), ("sys", 0o555)):
        (root / folder).mkdir(parents=True)
        (root / folder).chmod(mode)
    for link, target in links.items():
        (root / link.lstrip("/")).symlink_to(target)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=1))
