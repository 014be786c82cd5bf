"""Files of a pod's volumes on the node.

configMap, secret, downwardAPI and projected volumes use the kubelet's layout: files live in a directory named by their
content, `..data` points at it and is swapped by one rename, so that a reader sees all old files or all new ones. Reads
objects only through ContentSource.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_cli.node.base import ContentSource, PodEnvironment
from paceline_cli.node.expand import ConfigError, field_value, resource_value
from paceline_cli.node.pod import Pod, Volume, VolumeItem, VolumeSourceSpec

_DATA = "..data"


@dataclass(frozen=True, slots=True)
class File:
    """Content and mode of one file of a volume."""

    content: bytes
    mode: int


async def volume_files(
    volume: Volume, pod: Pod, environment: PodEnvironment, content: ContentSource, capacity: Mapping[str, str]
) -> dict[str, File]:
    """The files of a volume by relative path; raises ConfigError where a required object or key is missing."""
    files: dict[str, File] = {}
    for source in volume.sources:
        if source.kind == "downwardAPI":
            for item in source.items:
                files[item.path] = File(_downward(item, pod, environment, capacity), item.mode or volume.default_mode)
        elif source.kind == "serviceAccountToken":
            token = await content.service_account_token(pod, source.audience, source.expiration)
            files[source.items[0].path] = File(token, volume.default_mode)
        else:
            files.update(await _object_files(source, volume, pod, content))
    return files


def _downward(item: VolumeItem, pod: Pod, environment: PodEnvironment, capacity: Mapping[str, str]) -> bytes:
    if item.source == "field":
        return field_value(pod, environment, item.key).encode()
    container, _, resource = item.key.partition("/")
    return resource_value(pod, capacity, container, resource).encode()


async def _object_files(source: VolumeSourceSpec, volume: Volume, pod: Pod, content: ContentSource) -> dict[str, File]:
    read = content.secret if source.kind == "secret" else content.config_map
    data = await read(pod.namespace, source.ref)
    if data is None:
        if source.optional:
            return {}
        raise ConfigError(f"volume {volume.name!r}: {source.kind.lower()} {source.ref!r} not found")
    items = source.items or tuple(VolumeItem(key, key) for key in sorted(data))
    files = {}
    for item in items:
        if item.key in data:
            files[item.path] = File(data[item.key], item.mode or volume.default_mode)
        elif not source.optional:
            raise ConfigError(f"volume {volume.name!r}: {source.kind.lower()} {source.ref!r} has no key {item.key!r}")
    return files


def write_files(root: Path, files: Mapping[str, File], owner: tuple[int, int] | None) -> bool:
    """Makes `root` show exactly `files`; returns False if it already did.

    `owner` None: the node's user alone may read (modes lose group and other bits).
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o755 if owner else 0o700)
    version = "..v-" + _digest(files)
    current = root / _DATA
    old = current.readlink().name if current.is_symlink() else None
    if old == version:
        return False
    _fill(root / version, files, owner)
    swap = root / "..data_tmp"
    swap.unlink(missing_ok=True)
    swap.symlink_to(version)
    swap.replace(current)
    _link_names(root, {path.split("/")[0] for path in files})
    if old is not None:
        shutil.rmtree(root / old, ignore_errors=True)
    return True


def _digest(files: Mapping[str, File]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path, file in sorted(files.items()):
        for part in (path.encode(), file.content, str(file.mode).encode()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _fill(target: Path, files: Mapping[str, File], owner: tuple[int, int] | None) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o755 if owner else 0o700)
    for path, file in files.items():
        where = target / path
        where.parent.mkdir(parents=True, exist_ok=True)
        mode = file.mode if owner else file.mode & 0o700
        descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.content)
            os.fchmod(stream.fileno(), mode)
            if owner:
                os.fchown(stream.fileno(), *owner)


def _link_names(root: Path, names: set[str]) -> None:
    """`root/NAME` -> `..data/NAME` for each first path component; stale links go."""
    for entry in root.iterdir():
        if not entry.name.startswith("..") and entry.name not in names:
            entry.unlink()
    for name in names:
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"{_DATA}/{name}")


def make_empty_dir(root: Path, owner: tuple[int, int] | None) -> None:
    """A fresh emptyDir: open to every user of the pod (0777), or private where the node's user is the pod's."""
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o777 if owner else 0o700)
    if owner:
        os.chown(root, *owner)


def directory_bytes(root: Path) -> int:
    """Bytes of the files below `root`; files that vanish while it looks count as 0."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(Path(folder) / name).st_size
            except OSError:
                continue
    return total
