"""The place that a `paceline kv` command works on: a disk tier's folder, `s3://BUCKET/PREFIX`, or a node server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline_cli.errors import BadInput, CliError
from paceline_kvstore.config import parse_size
from paceline_kvstore.errors import FolderUnusable, KVStoreError
from paceline_kvstore.s3.settings import S3Settings
from paceline_kvstore.tiers.disk import DiskTier
from paceline_kvstore.tiers.remote import RemoteOptions, RemoteTier
from paceline_kvstore.tiers.s3 import S3Tier
from paceline_kvstore.wire.address import parse_address
from paceline_kvstore.wire.tls import ClientTls

UNBOUNDED = 1 << 60
"""Capacity of a folder that is only looked at: nothing may be evicted for that."""

Stored = DiskTier | S3Tier | RemoteTier


@dataclass(frozen=True, slots=True)
class Place:
    """What the user named, and how to reach it. `where` is a folder's path, or an s3://, tcp:// or unix:// address."""

    where: str
    endpoint: str | None = None
    region: str | None = None
    credentials_dir: Path | None = None
    ca_file: Path | None = None
    token_file: Path | None = None

    @property
    def is_s3(self) -> bool:
        return self.where.startswith("s3://")

    @property
    def is_node(self) -> bool:
        return self.where.startswith(("tcp://", "unix://"))

    @contextlib.contextmanager
    def open(self, capacity: int = UNBOUNDED) -> Iterator[Stored]:
        """The tier, closed at the end. CliError for whatever is wrong with the place, also while it is used."""
        with _one_line(self.where):
            tier = self._tier(capacity)
            try:
                yield tier
            finally:
                tier.close()

    def _tier(self, capacity: int) -> Stored:
        if self.is_s3:
            return S3Tier(self.s3_settings())
        return self.node() if self.is_node else DiskTier(self.folder(), capacity)

    def node(self) -> RemoteTier:
        """A client of the node server. CliError if it does not answer."""
        try:
            address = parse_address(self.where)
            token = "" if self.token_file is None else self.token_file.read_text("utf-8").strip()
        except ValueError as error:
            raise BadInput(str(error)) from None
        except OSError as error:
            raise BadInput(f"--token-file: can't read {self.token_file}: {error.strerror}") from None
        tier = RemoteTier(address, RemoteOptions(token=token, tls=self._tls()))
        if not tier.capacity:
            tier.close()
            raise CliError(f"{self.where}: no KV server answers there, or it wants another --token-file or --ca-file")
        return tier

    def _tls(self) -> ClientTls | None:
        if self.ca_file is None:
            return None
        tls = ClientTls(self.ca_file)
        try:
            tls.context()
        except OSError as error:
            raise BadInput(f"--ca-file: can't use {self.ca_file}: {error.strerror or error}") from None
        return tls

    def folder(self) -> Path:
        """The folder. BadInput unless a disk tier has been in it."""
        if self.endpoint or self.region or self.credentials_dir or self.ca_file:
            raise BadInput(
                f"{self.where} is a folder: --endpoint, --region, --credentials-dir, --ca-file are for s3://"
            )
        folder = Path(self.where)
        if not folder.is_dir():
            raise BadInput(f"{self.where}: no such folder; check the path, or write s3://BUCKET/PREFIX")
        if not (folder / "lock").exists():
            raise BadInput(f"{self.where}: no KV was ever stored here; give the folder of a disk tier")
        return folder

    def s3_settings(self) -> S3Settings:
        bucket, _, prefix = self.where.removeprefix("s3://").partition("/")
        try:
            settings = S3Settings(
                bucket=bucket,
                endpoint=self.endpoint,
                region=self.region,
                credentials_dir=self.credentials_dir,
                ca_file=self.ca_file,
            )
            return replace(settings, prefix=prefix) if prefix else settings
        except ValueError as error:
            raise BadInput(f"{self.where}: {error}") from None


def size_of(option: str, text: str, minimum: int = 0) -> int:
    """Bytes of an option's value like 8Mi. BadInput."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from None
    if size < minimum:
        raise BadInput(f"{option}: it is at least {minimum} bytes, not {size}")
    return size


@contextlib.contextmanager
def _one_line(where: str) -> Iterator[None]:
    try:
        yield
    except FolderUnusable as error:
        raise BadInput(str(error)) from None
    except KVStoreError as error:
        raise CliError(f"{where}: {error}") from None
    except KeyboardInterrupt:
        raise CliError("interrupted; nothing of this command is left behind") from None
