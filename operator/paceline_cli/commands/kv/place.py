"""The place that a `paceline kv` command works on: a folder of a disk tier, or `s3://BUCKET/PREFIX`."""

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
from paceline_kvstore.tiers.s3 import S3Tier

UNBOUNDED = 1 << 60
"""Capacity of a folder that is only looked at: nothing may be evicted for that."""

Stored = DiskTier | S3Tier


@dataclass(frozen=True, slots=True)
class Place:
    """What the user named, and how to reach it. `where` is a folder's path or an s3:// address."""

    where: str
    endpoint: str | None = None
    region: str | None = None
    credentials_dir: Path | None = None
    ca_file: Path | None = None

    @property
    def is_s3(self) -> bool:
        return self.where.startswith("s3://")

    @contextlib.contextmanager
    def open(self, capacity: int = UNBOUNDED) -> Iterator[Stored]:
        """The tier, closed at the end. CliError for whatever is wrong with the place, also while it is used."""
        with _one_line(self.where):
            tier = S3Tier(self.s3_settings()) if self.is_s3 else DiskTier(self.folder(), capacity)
            try:
                yield tier
            finally:
                tier.close()

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


def size_of(option: str, text: str) -> int:
    """Bytes of an option's value like 8Mi. BadInput."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from None


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
