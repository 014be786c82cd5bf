"""Reads the API server's audit log: which writes reached the cluster between two moments.

Why: "applying twice makes 0 writes" is a claim about the API server, so it is read there and not from a client's
counters. The server writes an entry before it answers (blocking mode), so a request that has returned is in the log.
Imports nothing of the product.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# Answered by the server without storing anything.
NOT_STORED = frozenset({"authentication.k8s.io", "authorization.k8s.io"})


@dataclass(frozen=True)
class Write:
    """One mutation that the API server carried out (status below 400, no dry run)."""

    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    user_agent: str

    def __str__(self) -> str:
        sub = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.resource}{sub} {self.namespace}/{self.name} by {self.user} ({self.user_agent})"


class AuditLog:
    """The log file of one API server."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self) -> int:
        """A position to pass to `writes` later."""
        return self._path.stat().st_size if self._path.exists() else 0

    def writes(self, since: int = 0, namespace: str | None = None) -> list[Write]:
        """Mutations after `since`, in order, except Leases, token requests and reviews, which store no state.

        `namespace` None means every namespace; events are listed like any other object.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(since)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        found = [write for line in complete.splitlines() if (write := _parse(json.loads(line))) is not None]
        return [write for write in found if namespace is None or write.namespace == namespace]


def _parse(entry: dict) -> Write | None:
    target = entry.get("objectRef") or {}
    resource, group = target.get("resource", ""), target.get("apiGroup", "")
    subresource = target.get("subresource", "")
    if entry.get("responseStatus", {}).get("code", 0) >= 400 or "dryRun=" in entry.get("requestURI", ""):
        return None
    if resource == "leases" or group in NOT_STORED or subresource == "token":
        return None
    return Write(
        verb=entry["verb"],
        group=group,
        resource=resource,
        subresource=subresource,
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        user=entry.get("user", {}).get("username", ""),
        user_agent=entry.get("userAgent", "").split(" ")[0],
    )
