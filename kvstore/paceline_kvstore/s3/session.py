"""A client of the settings' endpoint and credentials, with explicit timeouts and without botocore's retries.

botocore is boto3's core; boto3 itself would add only transfers of files.
"""

from __future__ import annotations

import functools
import importlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.s3.settings import S3Settings

# botocore renews credentials that expire in less than 15 minutes: these are read again every 20 seconds.
_FILES_LIFE = timedelta(minutes=15, seconds=20)


def boto(module: str) -> Any:
    """A module of boto3 or botocore, which are imported only where S3 is used. KVStoreError if they are not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KVStoreError("the S3 tier needs the package boto3: pip install 'paceline[s3]'") from error


def make_session(settings: S3Settings) -> Any:
    """A session with the settings' credentials; making one is slow. KVStoreError if they can't be read."""
    session = boto("botocore.session").get_session()
    session.register_component("data_loader", _models())
    if settings.credentials_dir is not None:
        session._credentials = _from_files(settings.credentials_dir)
    elif settings.access_key is not None:
        session.set_credentials(settings.access_key, settings.secret_key, settings.session_token)
    return session


def make_client(session: Any, settings: S3Settings, *, connections: int, read_timeout: float) -> Any:
    """A client with a pool of that many connections. Its calls are safe for threads, making it is not."""
    style = settings.path_style if settings.path_style is not None else settings.endpoint is not None or None
    config = boto("botocore.config").Config(
        connect_timeout=settings.connect_timeout,
        read_timeout=read_timeout,
        max_pool_connections=connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        tcp_keepalive=True,
        s3={"addressing_style": {True: "path", False: "virtual", None: "auto"}[style]},
        # Chunks carry a checksum of their own, and requests are signed over their bodies on plain http.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return session.create_client(
        "s3",
        config=config,
        region_name=settings.region or session.get_config_variable("region") or "us-east-1",
        endpoint_url=settings.endpoint,
        verify=str(settings.ca_file) if settings.ca_file is not None else None,
    )


@functools.cache
def _models() -> Any:
    """The loader of botocore's service models, which reads S3's megabyte of JSON once."""
    return boto("botocore.loaders").create_loader()


def _from_files(folder: Path) -> Any:
    def read() -> dict[str, str]:
        try:
            return {
                "access_key": (folder / "AWS_ACCESS_KEY_ID").read_text("utf-8").strip(),
                "secret_key": (folder / "AWS_SECRET_ACCESS_KEY").read_text("utf-8").strip(),
                "token": _optional(folder / "AWS_SESSION_TOKEN"),
                "expiry_time": (datetime.now(UTC) + _FILES_LIFE).isoformat(),
            }
        except OSError as error:
            raise KVStoreError(f"no credentials of S3 in {folder}: {error}: mount the Secret there") from error

    refreshable = boto("botocore.credentials").RefreshableCredentials
    return refreshable.create_from_metadata(metadata=read(), refresh_using=read, method="paceline-secret")


def _optional(path: Path) -> str:
    return path.read_text("utf-8").strip() if path.exists() else ""
