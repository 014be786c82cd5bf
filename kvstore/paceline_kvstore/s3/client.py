"""One bucket: single requests, each tried once, with errors as TierFault. Retries and deadlines are their callers'."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from paceline_kvstore.breaker import Outcome
from paceline_kvstore.codec import Buffer
from paceline_kvstore.errors import CorruptChunk, TierFault
from paceline_kvstore.s3.session import boto, make_client
from paceline_kvstore.s3.settings import S3Settings

_SLICE = 256 << 10
_FAST_SECONDS = 0.05
_DELETE_BATCH = 1000
_THROTTLED = {"SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequests"}
_UNSUPPORTED = {"NotImplemented", "InvalidArgument", "InvalidRequest"}


class Missing(Exception):
    """The object is not there."""


class Exists(Exception):
    """A conditional put found the object there."""


class Abandoned(Exception):
    """The caller no longer waits for this read."""


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a range's bytes go, and how long they are wanted.

    `place` takes the object's whole size once it is known and gives the memory for this range; what it raises ends the
    read. `until` is in time.monotonic().
    """

    place: Callable[[int], memoryview]
    until: float
    is_wanted: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing. Size in bytes."""

    name: str
    size: int
    modified: datetime


class Bucket:
    """Requests to one bucket over a pool of `connections`. Safe to call from several threads."""

    def __init__(self, session: Any, settings: S3Settings, *, connections: int, read_timeout: float) -> None:
        self._bucket = settings.bucket
        self._timeout = read_timeout
        self._put_options = {"StorageClass": settings.storage_class} if settings.storage_class else {}
        self._errors = boto("botocore.exceptions")
        self.client = make_client(session, settings, connections=connections, read_timeout=read_timeout)

    def read(self, name: str, offset: int, length: int, sink: Sink) -> None:
        """Read up to `length` bytes from `offset` on into `sink`.

        Raises Missing, Abandoned, CorruptChunk for an object too short, TierFault, and what `sink.place` raises.
        """
        answer = self._call("get_object", Key=name, Range=f"bytes={offset}-{offset + length - 1}")
        body = answer["Body"]
        try:
            size, begin = _size_and_begin(answer)
            if begin != offset:
                raise TierFault(f"S3 answered a range that begins at {begin}, asked for was {offset}")
            target = sink.place(size)
            if len(target) != answer["ContentLength"]:
                raise TierFault(f"S3 answered {answer['ContentLength']} bytes, asked for were {len(target)}")
            self._fill(body, target, sink)
        except BaseException:
            # What is unread would be read by the connection's next user.
            body.close()
            raise

    def head(self, name: str) -> tuple[int, Mapping[str, str]]:
        """Size and metadata of an object. Raises Missing, TierFault."""
        answer = self._call("head_object", Key=name)
        return int(answer["ContentLength"]), answer.get("Metadata", {})

    def put(self, name: str, body: Buffer, metadata: Mapping[str, str], *, conditional: bool) -> None:
        """Store an object; with `conditional` only if there is none of that name, else Exists. Raises TierFault."""
        options = {"IfNoneMatch": "*"} if conditional else {}
        self._call("put_object", Key=name, Body=body, Metadata=dict(metadata), **options, **self._put_options)

    def begin_parts(self, name: str, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; its id."""
        return self._call("create_multipart_upload", Key=name, Metadata=dict(metadata), **self._put_options)["UploadId"]

    def put_part(self, name: str, upload: str, number: int, body: Buffer) -> str:
        """Store one part, from 1 on; its ETag."""
        return self._call("upload_part", Key=name, UploadId=upload, PartNumber=number, Body=body)["ETag"]

    def end_parts(self, name: str, upload: str, etags: Sequence[str], *, conditional: bool) -> None:
        """Make the parts one object; Exists as in `put`."""
        options = {"IfNoneMatch": "*"} if conditional else {}
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        self._call("complete_multipart_upload", Key=name, UploadId=upload, MultipartUpload={"Parts": parts}, **options)

    def abort_parts(self, name: str, upload: str) -> None:
        """Drop a multipart upload's parts; one that is gone already is no error."""
        with suppress(Missing):
            self._call("abort_multipart_upload", Key=name, UploadId=upload)

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str, datetime]]:
        """Multipart uploads that were neither ended nor aborted: name, id, beginning."""
        options: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=prefix, **options)
            for upload in page.get("Uploads", ()):
                yield upload["Key"], upload["UploadId"], upload["Initiated"]
            if not page.get("IsTruncated"):
                return
            options = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error. Raises TierFault if one could not be removed."""
        for begin in range(0, len(names), _DELETE_BATCH):
            batch = [{"Key": name} for name in names[begin : begin + _DELETE_BATCH]]
            answer = self._call("delete_objects", Delete={"Objects": batch, "Quiet": True})
            if errors := answer.get("Errors"):
                raise TierFault(f"S3 did not delete {len(errors)} objects, the first for {errors[0].get('Code')}")

    def list(self, prefix: str) -> Iterator[Listed]:
        """The objects whose names begin so, in order of name."""
        options: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=prefix, **options)
            for entry in page.get("Contents", ()):
                yield Listed(entry["Key"], entry["Size"], entry["LastModified"])
            if not page.get("IsTruncated"):
                return
            options = {"ContinuationToken": page["NextContinuationToken"]}

    def close(self) -> None:
        self.client.close()

    def _fill(self, body: Any, target: memoryview, sink: Sink) -> None:
        """Read the body to its end. A stalled or trickling one ends at the sink's deadline."""
        # urllib3's own readinto makes an object of every slice and copies it. The response under it reads into place,
        # but returns only when the slice is full: from a slow server it takes what one receive brings.
        answer = body._raw_stream
        read_full, read_some = answer._fp.readinto, answer._fp.readinto1
        is_fast = False
        at = 0
        while at < len(target):
            if not sink.is_wanted():
                raise Abandoned
            begun = time.monotonic()
            if begun >= sink.until:
                raise TierFault("the read's deadline passed", Outcome.TIMEOUT)
            body.set_socket_timeout(min(self._timeout, sink.until - begun))
            try:
                read = (read_full if is_fast else read_some)(target[at : at + _SLICE])
            except Exception as error:
                raise self._fault(error) from error
            if not read:
                raise TierFault(f"the answer ended after {at} of {len(target)} bytes")
            at += read
            is_fast = time.monotonic() - begun < _FAST_SECONDS
        with suppress(Exception):
            answer.read()  # Nothing is left: this returns the connection to the pool.

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            return getattr(self.client, method)(Bucket=self._bucket, **arguments)
        except (self._errors.BotoCoreError, self._errors.ClientError, OSError) as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> Exception:
        """What a caller can decide by."""
        errors = self._errors
        if isinstance(error, errors.ClientError):
            return _of_answer(error)
        text = " ".join(str(error).split())
        if isinstance(error, errors.ReadTimeoutError | errors.ConnectTimeoutError | TimeoutError):
            return TierFault(f"S3 did not answer in time: {text}", Outcome.TIMEOUT)
        if isinstance(error, errors.NoCredentialsError | errors.PartialCredentialsError):
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give a folder that has them"
            return TierFault(f"no credentials for S3: {text}; {hint}", Outcome.DENIED, retryable=False)
        return TierFault(f"S3 can't be reached: {text}")


def _of_answer(error: Any) -> Exception:
    """An error that S3 answered with."""
    response = error.response
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(response.get("Error", {}).get("Code", "?"))
    text = f"S3 answered {status} {code} to {error.operation_name}"
    if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and error.operation_name == "HeadObject"):
        return Missing(text)
    if status == 412:
        return Exists(text)
    if status == 416:
        return CorruptChunk(f"the object is shorter than the range asked for ({text})")
    if status in (401, 403):
        return TierFault(f"{text}: check credentials and permissions", Outcome.DENIED, status=status, retryable=False)
    if status in (429, 503) or code in _THROTTLED:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return TierFault(text, Outcome.THROTTLED, status=status, retry_after=_seconds(headers.get("retry-after")))
    # 408 and 409 ask for the same request again; other answers of 4xx stay as they are.
    retryable = status >= 500 or status in (0, 404, 408, 409)
    return TierFault(text, status=status, retryable=retryable)


def is_unsupported(fault: TierFault) -> bool:
    """Whether a conditional put failed because the server does not know conditions."""
    return fault.status in (400, 501) and any(code in str(fault) for code in _UNSUPPORTED)


def _seconds(header: str | None) -> float:
    """A Retry-After in seconds; a date or nonsense counts as none, more than a minute as one."""
    try:
        return min(max(float(header or 0), 0.0), 60.0)
    except ValueError:
        return 0.0


def _size_and_begin(answer: Mapping[str, Any]) -> tuple[int, int]:
    """The whole object's size and where the answer begins, of an answer to a range, or of a whole object."""
    if (range_of := answer.get("ContentRange")) is None:
        return int(answer["ContentLength"]), 0
    span, _, size = str(range_of).removeprefix("bytes ").partition("/")
    try:
        return int(size), int(span.partition("-")[0])
    except ValueError:
        raise TierFault(f"S3 answered a range that can't be read: {range_of!r}") from None
