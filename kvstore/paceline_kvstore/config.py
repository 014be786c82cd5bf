"""Settings of a store, as a KVStore object or a file has them, checked. Must not do I/O.

    {"memory": {"capacity": "8Gi"},
     "disk": {"path": "/var/lib/paceline/kv", "capacity": "100Gi"},
     "node": {"address": "tcp://kv.local:7460", "tokenFile": "/etc/kv-node/token", "caFile": "/etc/kv-node/ca.crt"},
     "s3": {"bucket": "fleet-kv", "prefix": "prod", "endpoint": "https://s3.example", "credentialsDir": "/etc/kv-s3"},
     "encryptionKeyFile": "/etc/kv-key/keys", "encoding": "zstd", "ttl": 86400, "reuse": "measured",
     "tenantQuotas": {"acme": "10Gi"}}

Each error is one line: the field, what is wrong, what to write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar, cast

from paceline_kvstore.encoding import Encoding
from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.policy.reuse import ReuseMode
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.wire.address import Address, parse_address

CAPACITY_MIN = 64 << 10
_QUANTITY = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_UNITS = {
    None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30,
    "Ti": 1 << 40,
}  # fmt: skip


_T = TypeVar("_T")
_Enum = TypeVar("_Enum", bound=StrEnum)


class BadSettings(KVStoreError):
    """A setting is wrong or missing. The message is one line that begins with the field's name."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """A folder of the tier's own, and the physical bytes that it may take."""

    path: Path
    capacity: int


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """A node server, and the file with its token, if it wants one.

    ca_file: authorities that its certificate must lead to; None: it is spoken to without TLS.
    """

    address: Address
    token_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Which tiers there are, and what holds for all of them. At least one of memory, disk, node and s3.

    memory: bytes in this process. encryption_key_file: `crypto.read_key_file`; seals what goes to disk and S3, in which
    `encoding` makes it smaller before. ttl:
    seconds that a chunk lives in memory and on disk, in S3 as well if it is sealed; else the bucket's lifecycle rules
    say it there, as the node server's own setting does for it. tenant_quotas: bytes in each of memory and disk by
    tenant, default_quota: for the others.
    """

    memory: int | None = None
    disk: DiskSettings | None = None
    node: NodeSettings | None = None
    s3: S3Settings | None = None
    encryption_key_file: Path | None = None
    encoding: Encoding = Encoding.NONE
    ttl: float | None = None
    reuse: ReuseMode = ReuseMode.MEASURED
    tenant_quotas: Mapping[str, int] = field(default_factory=dict[str, int])
    default_quota: int | None = None

    def __post_init__(self) -> None:
        if all(tier is None for tier in (self.memory, self.disk, self.node, self.s3)):
            raise BadSettings("memory, disk, node, s3: no tier is set: set at least one of them")
        if self.encoding is not Encoding.NONE and self.disk is None and self.s3 is None:
            raise BadSettings("encoding: it is for disk and S3, and neither is set: leave it out")

    def namespace(self, digest: bytes) -> bytes:
        """The namespace of a store's chunks: the model's own digest, or one of numbers that are near those computed."""
        if not self.encoding.is_lossy:
            return digest
        return blake2b(digest, digest_size=len(digest), person=f"kv-{self.encoding}".encode()).digest()


def parse_settings(document: object) -> StoreSettings:
    """The settings of a JSON document. Raises BadSettings."""
    fields = _Fields("", document)
    memory, disk, node, s3 = (fields.part(name) for name in ("memory", "disk", "node", "s3"))
    settings = StoreSettings(
        memory=None if memory is None else memory.end(memory.capacity()),
        disk=None if disk is None else disk.end(DiskSettings(disk.path("path"), disk.capacity())),
        node=None if node is None else node.end(_node(node)),
        s3=None if s3 is None else s3.end(_s3(s3)),
        encryption_key_file=fields.optional("encryptionKeyFile", fields.path),
        encoding=fields.one_of("encoding", Encoding, Encoding.NONE),
        ttl=fields.seconds("ttl"),
        reuse=fields.one_of("reuse", ReuseMode, ReuseMode.MEASURED),
        tenant_quotas=fields.sizes("tenantQuotas"),
        default_quota=fields.optional("defaultQuota", fields.size),
    )
    return fields.end(settings)


def _node(fields: _Fields) -> NodeSettings:
    try:
        address = parse_address(fields.text("address"))
    except ValueError as error:
        raise BadSettings(f"node.address: {error}") from None
    ca_file = fields.optional("caFile", fields.path)
    if ca_file is not None and address.path:
        raise BadSettings("node.caFile: TLS is for tcp:// addresses: leave it out for a Unix socket")
    return NodeSettings(address, fields.optional("tokenFile", fields.path), ca_file)


def _s3(fields: _Fields) -> S3Settings:
    given = {
        "bucket": fields.text("bucket"),
        "prefix": fields.optional("prefix", fields.text),
        "endpoint": fields.optional("endpoint", fields.text),
        "region": fields.optional("region", fields.text),
        "storage_class": fields.optional("storageClass", fields.text),
        "credentials_dir": fields.optional("credentialsDir", fields.path),
        "ca_file": fields.optional("caFile", fields.path),
        "capacity": fields.optional("capacity", fields.size),
    }
    try:
        return S3Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValueError as error:
        raise BadSettings(f"s3: {error}") from None


class _Fields:
    """One object of the document; every field must be read before `end`."""

    def __init__(self, name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise BadSettings(f"{name or 'settings'}: {_shown(value)} is not an object: write {{...}}")
        self._name = name
        self._values = cast(Mapping[str, object], value)
        self._read: set[str] = set()

    def end(self, settings: _T) -> _T:
        """`settings`, if all fields were known."""
        unknown = sorted(str(name) for name in self._values if name not in self._read)
        if unknown:
            raise BadSettings(f"{self._of(unknown[0])}: there is no such setting: write {_listed(sorted(self._read))}")
        return settings

    def optional(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        return None if self._get(name) is None else parse(name)

    def part(self, name: str) -> _Fields | None:
        value = self._get(name)
        return None if value is None else _Fields(name, value)

    def text(self, name: str) -> str:
        value = self._required(name)
        if not isinstance(value, str) or not value:
            raise BadSettings(f"{self._of(name)}: {_shown(value)} is not a text")
        return value

    def path(self, name: str) -> Path:
        path = Path(self.text(name))
        if not path.is_absolute():
            raise BadSettings(f"{self._of(name)}: {str(path)!r} is not an absolute path")
        return path

    def size(self, name: str) -> int:
        return _size(self._of(name), self._required(name))

    def capacity(self) -> int:
        size = self.size("capacity")
        if size < CAPACITY_MIN:
            raise BadSettings(f"{self._of('capacity')}: {size} bytes are too few: {CAPACITY_MIN} or more")
        return size

    def sizes(self, name: str) -> dict[str, int]:
        value = self._get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise BadSettings(f"{self._of(name)}: {_shown(value)} is not an object: write {{TENANT: BYTES}}")
        sizes = cast(Mapping[str, object], value)
        return {tenant: _size(f"{self._of(name)}.{tenant}", size) for tenant, size in sizes.items()}

    def seconds(self, name: str) -> float | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise BadSettings(f"{self._of(name)}: {_shown(value)} is not a number of seconds above 0")
        return float(value)

    def one_of(self, name: str, kind: type[_Enum], default: _Enum) -> _Enum:
        value = self._get(name)
        if value is None:
            return default
        try:
            return kind(value)
        except ValueError:
            raise BadSettings(f"{self._of(name)}: {_shown(value)} is none of {_listed(list(kind))}") from None

    def _get(self, name: str) -> object:
        self._read.add(name)
        return self._values.get(name)

    def _required(self, name: str) -> object:
        value = self._get(name)
        if value is None:
            raise BadSettings(f"{self._of(name)}: it is missing")
        return value

    def _of(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name


def parse_size(text: str) -> int:
    """Bytes of a number like 1048576, 8Gi or 10G. Raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes: write one like 1048576 or 8Gi")
    return int(match[1]) * _UNITS[match[2]]


def _size(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise BadSettings(f"{name}: {error}") from None
    raise BadSettings(f"{name}: {_shown(value)} is not a number of bytes: write one like 1048576 or 8Gi")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _listed(names: list[str]) -> str:
    return ", ".join(names)
