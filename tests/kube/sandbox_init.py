"""Starts one process of a container: `sandbox_init.py SPEC.json`, the part that a container runtime has in a cluster.

A container gets namespaces of its own (mount, process ids, IPC, host name) inside its Pod's network namespace and a
root assembled from read-only binds; an exec (probe, preStop) joins the namespaces of the running container. This
process stays in front, passes signals on and ends with the container's exit code. Only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import sandbox_rights

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
EXEC_JOIN_TIMEOUT_S = 5.0
EXIT_SETUP_FAILED, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 128, 126, 127

_libc = ctypes.CDLL(None, use_errno=True)


def main(path: str) -> int:
    """Run the spec at `path`; return the exit code of its process."""
    spec = json.loads(Path(path).read_text())
    Path(path).unlink()
    try:
        if spec["exec"]:
            _join(spec)
        else:
            _enter_new_namespaces(spec)
    except OSError as error:
        sys.stderr.write(f"cannot start {spec['argv'][0]}: {error}\n")
        return EXIT_SETUP_FAILED
    child = 0
    early: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        if child:
            os.kill(child, number)
        else:
            early.append(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    child = os.fork()
    if child == 0:
        os._exit(_child(spec))
    for number in early:
        os.kill(child, number)
    if not spec["exec"]:
        _write_record(spec["record"], child)
    _, status = os.waitpid(child, 0)
    if not spec["exec"]:
        Path(spec["record"]).unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _child(spec: dict[str, Any]) -> int:
    """Become the container's process. Returns only if that failed."""
    try:
        # A session of its own: what signals this process's group must not reach the container a second time.
        os.setsid()
        _reset_signals()
        if not spec["exec"]:
            _build_root(spec)
        os.chdir(spec["cwd"] or "/")
        sandbox_rights.apply(spec["rights"])
        # After the change of user, which would clear it.
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except FileNotFoundError as error:
        sys.stderr.write(f"cannot start {spec['argv'][0]}: {error}\n")
        return EXIT_NOT_FOUND
    except PermissionError as error:
        sys.stderr.write(f"cannot start {spec['argv'][0]}: {error}\n")
        return EXIT_NOT_EXECUTABLE
    except OSError as error:
        sys.stderr.write(f"cannot start {spec['argv'][0]}: {error}\n")
    return EXIT_SETUP_FAILED


def _reset_signals() -> None:
    # An ignored signal stays ignored across exec, and Python ignores these two.
    for number in (*PASSED_ON, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _write_record(path: str, pid: int) -> None:
    temporary = Path(f"{path}.{pid}")
    temporary.write_text(str(pid))
    temporary.rename(path)


def _enter_new_namespaces(spec: dict[str, Any]) -> None:
    _setns(spec["netns"])
    Path(spec["record"]).unlink(missing_ok=True)
    _check(_libc.unshare(CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID), "unshare")
    name = spec["hostname"].encode()
    _check(_libc.sethostname(name, len(name)), "sethostname")


def _join(spec: dict[str, Any]) -> None:
    pid = _wait_record(Path(spec["record"]))
    descriptors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "ipc", "uts", "pid", "mnt")]
    for descriptor in descriptors:
        _check(_libc.setns(descriptor, 0), "setns")
        os.close(descriptor)


def _wait_record(record: Path) -> int:
    """Process id of the running container. An exec may be asked for a moment before the container is up."""
    deadline = time.monotonic() + EXEC_JOIN_TIMEOUT_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            return int(record.read_text())
        if time.monotonic() > deadline:
            raise OSError("the container is not running")
        time.sleep(0.01)


def _build_root(spec: dict[str, Any]) -> None:
    """Assemble the root and pivot to it. Order matters: image, kernel file systems, volumes, then read-only."""
    root = Path(spec["root"])
    # Not before the fork: the process in front keeps the node's files, where its record lies.
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    _mount("", "/", "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NODEV, "mode=0755")
    for source in spec["image"]:
        _bind(Path(source), _inside(root, source), read_only=True)
    for link, target in spec["links"].items():
        _inside(root, link).symlink_to(target)
    for folder, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("run", 0o755), ("proc", 0o555), ("sys", 0o555)):
        _make_dir(root / folder)
        (root / folder).chmod(mode)
    _mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _bind(Path("/sys"), root / "sys", read_only=True, flags=MS_BIND)
    _build_dev(root / "dev")
    for source, target in spec["files"]:
        if _inside(root, target).is_file():
            _bind(Path(source), _inside(root, target), read_only=False)
    # Shorter paths first, so that a volume inside a volume is not covered.
    for mount in sorted(spec["mounts"], key=lambda mount: mount["target"].count("/")):
        _bind(Path(mount["source"]), _inside(root, mount["target"]), read_only=mount["read_only"])
    for source in spec["covered"]:
        _bind(Path(source), _inside(root, source), read_only=True)
    if spec["read_only_root"]:
        _mount("", root, "", MS_REMOUNT | MS_RDONLY | MS_NODEV)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def _build_dev(dev: Path) -> None:
    dev.mkdir()
    _mount("tmpfs", dev, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=65536k")
    for name in DEVICES:
        _bind(Path("/dev") / name, dev / name, read_only=False)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (dev / name).symlink_to(f"/proc/self/{target}")
    (dev / "shm").mkdir()
    _mount("tmpfs", dev / "shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=1777,size=65536k")


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _make_dir(path: Path) -> None:
    """Like mkdir -p, each folder 0755 whatever the umask."""
    if path.is_dir():
        return
    _make_dir(path.parent)
    path.mkdir()
    path.chmod(0o755)


def _bind(source: Path, target: Path, *, read_only: bool, flags: int = MS_BIND | MS_REC) -> None:
    try:
        if source.is_dir():
            _make_dir(target)
        elif not target.exists():
            _make_dir(target.parent)
            target.touch()
    except OSError as error:
        raise OSError(error.errno, f"mount point {target}: {error.strerror}") from error
    _mount(source, target, "", flags)
    if read_only:
        _mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY)


def _mount(source: str | Path, target: str | Path, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source) or b"none", os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _check(result, f"mount {source} at {target}")


def _setns(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _check(_libc.setns(descriptor, 0), f"setns {path}")
    os.close(descriptor)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
