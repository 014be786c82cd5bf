"""Leadership by a coordination.k8s.io Lease: at most one operator writes.

Time is judged as client-go does: a Lease is dead when this process has seen no change of it for its whole duration on
its own monotonic clock, so clocks of different machines are never compared. The holder gives up before others may take
over: renewal must have succeeded within two thirds of the duration. Writes are optimistic (resourceVersion).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from paceline_api.kube import LEASE, KubeClient, KubeError, Manifest
from paceline_operator.settings import Clock

log = logging.getLogger(__name__)


class Leader:
    """One candidate. `step` is one attempt; `run` repeats it on the caller's thread."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        *,
        duration_s: float = 15.0,
    ) -> None:
        self._client = client
        self._place = (namespace, name)
        self._identity = identity
        self._clock = clock
        self._duration_s = duration_s
        self._seen: tuple[str, float] | None = None
        self._renewed_s: float | None = None

    @property
    def retry_s(self) -> float:
        return self._duration_s / 6

    @property
    def leading(self) -> bool:
        """Whether this process may still write."""
        if self._renewed_s is None:
            return False
        return self._clock.monotonic() - self._renewed_s < self._duration_s * 2 / 3

    def step(self) -> bool:
        """Acquires or renews if it may; whether it leads afterwards. Errors of the API count as no answer."""
        # The time before the request: the answer may be long on its way.
        now = self._clock.monotonic()
        try:
            if self._try(now):
                self._renewed_s = now
        except KubeError as error:
            log.warning("Lease %s/%s: %s", *self._place, error)
        return self.leading

    def run(self, stop: threading.Event, gained: Callable[[], None], lost: Callable[[], None]) -> None:
        """Blocks until `stop`. Calls `gained` once, and `lost` once if leadership then ends before `stop`.

        The lease is kept: `release` it when the last write is done.
        """
        led = False
        while not stop.is_set():
            leading = self.step()
            if leading and not led:
                log.info("Became leader as %s", self._identity)
                led = True
                gained()
            if led and not leading:
                lost()
                return
            stop.wait(self.retry_s)

    def release(self) -> None:
        """Lets the next candidate start at once. Best effort."""
        try:
            lease = self._client.get(LEASE, *self._place)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                self._client.replace({**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except KubeError as error:
            log.warning("Could not release the lease: %s", error)
        self._renewed_s = None

    def _try(self, now: float) -> bool:
        lease = self._client.get(LEASE, *self._place)
        if lease is None:
            self._client.create(self._document(None))
            return True
        holder = lease["spec"].get("holderIdentity") or ""
        version = str(lease["metadata"].get("resourceVersion"))
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now)
        expired = now - self._seen[1] >= float(lease["spec"].get("leaseDurationSeconds") or self._duration_s)
        if holder not in ("", self._identity) and not expired:
            return False
        self._client.replace(self._document(lease))
        return True

    def _document(self, lease: Manifest | None) -> Manifest:
        namespace, name = self._place
        stamp = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (lease or {}).get("spec") or {}
        spec: Manifest = {
            **before,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._duration_s)),
            "renewTime": stamp,
        }
        if before.get("holderIdentity") != self._identity:
            spec["acquireTime"] = stamp
            spec["leaseTransitions"] = int(before.get("leaseTransitions") or 0) + (lease is not None)
        metadata = {"name": name, "namespace": namespace} if lease is None else lease["metadata"]
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}
