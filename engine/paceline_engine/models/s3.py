"""Models from S3 and whatever speaks its protocol, through boto3 and its own settings.

Credentials, region and endpoint come as boto3 finds them ($AWS_ACCESS_KEY_ID, $AWS_ENDPOINT_URL_S3, profiles, roles).
A download lies in a `.part` folder with the listing it was begun for, goes on where it was cut, also in another
process, and gets its name when every file is whole: sizes always, MD5 where the ETag is one. No torch here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from paceline_engine.models import cache
from paceline_engine.models.errors import ModelError
from paceline_engine.models.remote import MAX_FILES, Progress, Remote, Unavailable, choose, retried

_LISTING = "listing.json"
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 20
_MD5 = re.compile(r"[0-9a-f]{32}")


def find(remote: Remote, cache_dir: Path) -> Path | None:
    """The downloaded folder or file."""
    entry = _entry(remote, cache_dir)
    path = entry / Path(remote.path).name if remote.is_file else entry
    return path if path.exists() else None


def download(remote: Remote, cache_dir: Path) -> Path:
    """Fetch the folder or file; where it is. Raises ModelError."""
    entry = _entry(remote, cache_dir)
    cache.hold(entry)
    with cache.locked(entry.parent / f"{entry.name}.lock"):
        if (found := find(remote, cache_dir)) is not None:
            return found
        bucket = _Bucket(remote)
        listing = retried(bucket.what, lambda: bucket.ask(bucket.list))
        part = _resumable(entry.parent / f"{entry.name}.part", listing)
        progress = Progress(remote.text, sum(item["size"] for item in listing.values()))
        for name, item in listing.items():
            retried(bucket.what, lambda name=name, item=item: bucket.ask(lambda: bucket.fetch(part / name, item)))
            progress.add(item["size"])
        (part / _LISTING).unlink()
        part.rename(entry)
    found = find(remote, cache_dir)
    assert found is not None, entry
    return found


def _entry(remote: Remote, cache_dir: Path) -> Path:
    """One for each endpoint, bucket and prefix."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    key = f"{endpoint}\0{remote.where}\0{remote.path}".encode()
    return cache_dir / "s3" / blake2b(key, digest_size=16, person=b"paceline-s3").hexdigest()


def _resumable(part: Path, listing: dict[str, dict[str, Any]]) -> Path:
    """The folder of an unfinished download of just these objects, or an empty one."""
    text = json.dumps(listing)
    try:
        if (part / _LISTING).read_text("utf-8") == text:
            return part
    except OSError:
        pass
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / _LISTING).write_text(text, "utf-8")
    return part


class _Bucket:
    """The bucket of one source."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.what = f"can't fetch model {remote.text!r}"
        try:
            from boto3.session import Session
            from botocore import exceptions
            from botocore.config import Config
        except ImportError as error:
            raise ModelError(
                f"model {remote.text!r} needs the package boto3: pip install 'paceline[sources]'"
            ) from error
        self._errors: Any = exceptions
        config = Config(
            connect_timeout=_TIMEOUT_SECONDS, read_timeout=_TIMEOUT_SECONDS, retries={"total_max_attempts": 1}
        )
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        self._client: Any = Session().client("s3", config=config, region_name=region)

    def list(self) -> dict[str, dict[str, Any]]:
        """File name -> key, size and ETag of each object to fetch."""
        remote = self._remote
        if remote.is_file:
            head = self._client.head_object(Bucket=remote.where, Key=remote.path)
            return {Path(remote.path).name: _item(remote.path, head["ContentLength"], head["ETag"])}
        prefix = f"{remote.path}/"
        found: dict[str, dict[str, Any]] = {}
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=remote.where, Prefix=prefix, Delimiter="/"
        )
        for page in pages:
            for entry in page.get("Contents", ()):
                found[entry["Key"][len(prefix) :]] = _item(entry["Key"], entry["Size"], entry["ETag"])
            if len(found) > MAX_FILES:
                raise ModelError(f"model {remote.text!r} has over {MAX_FILES} objects: name one model's folder")
        if not found:
            raise ModelError(f"model {remote.text!r}: nothing is under {prefix!r} in that bucket: check the prefix")
        return {name: found[name] for name in choose(remote, [*found])}

    def fetch(self, path: Path, item: dict[str, Any]) -> None:
        """Download one object, or what is missing of it; Unavailable if it came damaged."""
        have = path.stat().st_size if path.exists() else 0
        if have < item["size"]:
            options = {"Range": f"bytes={have}-"} if have else {}
            answer = self._client.get_object(
                Bucket=self._remote.where, Key=item["key"], IfMatch=f'"{item["etag"]}"', **options
            )
            with path.open("ab") as file:
                for chunk in answer["Body"].iter_chunks(_CHUNK):
                    file.write(chunk)
        elif item["size"] == 0:
            path.touch()
        size = path.stat().st_size
        if size < item["size"]:
            raise Unavailable(f"{path.name} was cut at {size} of {item['size']} bytes")
        if size != item["size"] or (_MD5.fullmatch(item["etag"]) and _md5(path) != item["etag"]):
            path.unlink()
            raise Unavailable(f"{path.name} came damaged")

    def ask(self, call: Any) -> Any:
        """The client's answer; its errors become Unavailable, or one line that says what to do."""
        text, errors = self._remote.text, self._errors
        try:
            return call()
        except errors.NoCredentialsError as error:
            raise ModelError(
                f"model {text!r}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        except errors.ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = error.response.get("Error", {}).get("Code", "?")
            if status == 412:
                raise ModelError(f"model {text!r} was changed while it was downloaded: start again") from error
            if status in (429, 503) or status >= 500 or code == "SlowDown":
                raise Unavailable(f"S3 answered {status} {code}") from error
            remedy = "check the credentials" if status in (401, 403) else "check bucket and prefix"
            raise ModelError(f"model {text!r}: S3 answered {status} {code}: {remedy}") from error
        except (errors.HTTPClientError, errors.ConnectionError, errors.IncompleteReadError) as error:
            raise Unavailable(f"S3 can't be reached ({error})") from error
        except errors.BotoCoreError as error:
            raise ModelError(f"model {text!r}: {' '.join(str(error).split())}: check the S3 settings") from error


def _item(key: str, size: int, etag: str) -> dict[str, Any]:
    return {"key": key, "size": size, "etag": etag.strip('"')}


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "md5").hexdigest()
