"""A network namespace of the tests' own: a bridge that stands in for the cluster network, and entering and leaving it.

Why: Pods need addresses that the API server takes for endpoints (loopback is refused), and the machine's own network
must neither be changed nor able to disturb the tests. The namespace lives as long as a file descriptor or a thread
holds it, so that a killed test run leaves nothing behind. Imports nothing of the product.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
BRIDGE = "paceline0"
BRIDGE_IP = "10.88.0.1"
PREFIX_LENGTH = 16
OWN_NAMESPACE = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceDenied(Exception):
    """This process may not make network namespaces; the message says what to do."""


@dataclass(frozen=True)
class NetworkNamespace:
    """A namespace held open by `fd`; inherited by no child unless it is passed on."""

    fd: int

    def close(self) -> None:
        os.close(self.fd)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and the threads and processes it starts, use this namespace inside the block."""
        before = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(self.fd)
            try:
                yield
            finally:
                setns(before)
        finally:
            os.close(before)


def setns(fd: int) -> None:
    """Move the calling thread into the network namespace `fd`."""
    if _libc.setns(fd, CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")


def in_own_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that may change its namespaces without moving the caller."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def create(setup: Callable[[], None] | None = None) -> NetworkNamespace:
    """Make a namespace with loopback up; `setup` runs inside it. Raises `NamespaceDenied` without the right to."""

    def work() -> NetworkNamespace:
        if _libc.unshare(CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise NamespaceDenied(
                f"cannot make a network namespace ({reason}): the tests on a real control plane need root on Linux "
                "(CAP_SYS_ADMIN and CAP_NET_ADMIN); run them as root"
            )
        ip("link set lo up")
        if setup is not None:
            setup()
        return NetworkNamespace(os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC))

    return in_own_thread(work)


def create_cluster_network() -> NetworkNamespace:
    """Make the namespace of the whole cluster with its bridge, on which the API server listens."""

    def setup() -> None:
        ip(
            f"link add {BRIDGE} type bridge",
            f"addr add {BRIDGE_IP}/{PREFIX_LENGTH} dev {BRIDGE}",
            f"link set {BRIDGE} up",
            # The API server asks for a default route when it looks for the address to announce.
            f"route add default dev {BRIDGE}",
        )

    return create(setup)


def attach_pod(pod: NetworkNamespace, address: str, host_end: str) -> None:
    """Join `pod` to the bridge of the caller's namespace by a veth pair; the pod's end is eth0 with `address`."""
    # /proc/self is the ip process; the descriptor belongs to this one.
    path = f"/proc/{os.getpid()}/fd/{pod.fd}"
    ip(
        f"link add {host_end} type veth peer name eth0 netns {path}",
        f"link set {host_end} master {BRIDGE} up",
    )

    def inside() -> None:
        setns(pod.fd)
        ip(
            f"addr add {address}/{PREFIX_LENGTH} dev eth0",
            "link set eth0 up",
            f"route add default via {BRIDGE_IP}",
        )

    in_own_thread(inside)


def detach_pod(host_end: str) -> None:
    """Remove the pod's veth pair from the caller's namespace; nothing happens if it is gone already."""
    if _has_link(host_end):
        ip(f"link del {host_end}")


def bridge_ports() -> list[str]:
    """Names of the links joined to the bridge of the caller's namespace."""
    listing = _run(["ip", "-o", "link", "show", "master", BRIDGE])
    return [line.split(": ")[1].split("@")[0] for line in listing.splitlines()]


def ip(*commands: str) -> None:
    """Run `ip` subcommands in the caller's namespace. Raises OSError with what `ip` said."""
    _run(["ip", "-batch", "-"], "\n".join(commands) + "\n")


def _has_link(name: str) -> bool:
    return subprocess.run(["ip", "link", "show", name], capture_output=True, check=False).returncode == 0


def _run(command: list[str], stdin: str = "") -> str:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError as error:
        raise OSError("the program `ip` is missing: install the package iproute2") from error
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} failed for {stdin.strip()!r}: {done.stderr.strip()}")
    return done.stdout
