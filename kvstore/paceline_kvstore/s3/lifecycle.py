"""The bucket's own tidying up: rules that expire old chunks and abort uploads that were never ended.

A tier never empties its bucket by itself: other fleets may share it. The server does, by these rules.
"""

from __future__ import annotations

from typing import Any

from paceline_kvstore.errors import KVStoreError
from paceline_kvstore.s3.session import boto, make_client, make_session
from paceline_kvstore.s3.settings import S3Settings


def lifecycle(settings: S3Settings, *, expire_days: int, abort_days: int = 1) -> dict[str, Any]:
    """The rules as PutBucketLifecycleConfiguration takes them, and `aws s3api` as JSON. ValueError for days below 1."""
    for name, days in (("expire_days", expire_days), ("abort_days", abort_days)):
        if days < 1:
            raise ValueError(f"{name} must be 1 or more, it is {days}")
    filter_ = {"Prefix": f"{settings.prefix}/"}
    rules = [
        {"ID": _id(settings, "expire"), "Status": "Enabled", "Filter": filter_, "Expiration": {"Days": expire_days}},
        {
            "ID": _id(settings, "abort"),
            "Status": "Enabled",
            "Filter": filter_,
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": abort_days},
        },
    ]
    return {"Rules": rules}


def apply_lifecycle(settings: S3Settings, *, expire_days: int, abort_days: int = 1) -> None:
    """Put the rules on the bucket beside those it has. Raises KVStoreError with what S3 said.

    Needs s3:GetLifecycleConfiguration and s3:PutLifecycleConfiguration, which a tier does not.
    """
    ours = lifecycle(settings, expire_days=expire_days, abort_days=abort_days)["Rules"]
    errors = boto("botocore.exceptions")
    client = make_client(make_session(settings), settings, connections=1, read_timeout=settings.write_timeout)
    try:
        theirs = [rule for rule in _rules(client, errors, settings) if rule.get("ID") not in {r["ID"] for r in ours}]
        client.put_bucket_lifecycle_configuration(
            Bucket=settings.bucket, LifecycleConfiguration={"Rules": [*theirs, *ours]}
        )
    except (errors.BotoCoreError, errors.ClientError) as error:
        text = " ".join(str(error).split())
        raise KVStoreError(f"bucket {settings.bucket!r} did not take the lifecycle rules: {text}") from error
    finally:
        client.close()


def _rules(client: Any, errors: Any, settings: S3Settings) -> list[dict[str, Any]]:
    """The rules that the bucket has; a put replaces them all."""
    try:
        return client.get_bucket_lifecycle_configuration(Bucket=settings.bucket)["Rules"]
    except errors.ClientError as error:
        if error.response.get("Error", {}).get("Code") == "NoSuchLifecycleConfiguration":
            return []
        raise


def _id(settings: S3Settings, what: str) -> str:
    return f"paceline-{what}-{settings.prefix.replace('/', '-')}"[:255]
