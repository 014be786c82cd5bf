"""Discovery: follows the namespace through watches and publishes snapshots.

One thread per watched kind, one per referenced Secret (so that RBAC can grant exactly those, by name), and one that
builds: it coalesces bursts, so a rollout costs a handful of snapshots. Readers take `snapshot`, one reference, no lock.
When the API server is away, the last snapshot stays in use.
"""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from paceline_api.kube import (
    ENDPOINT_SLICE,
    INFERENCE_SERVICE,
    ROUTER,
    SECRET,
    TENANT,
    EventType,
    Kind,
    KubeClient,
    Manifest,
)
from paceline_kube import Reflector
from paceline_router import records
from paceline_router.auth import digest
from paceline_router.snapshot import Observed, Snapshot, build

log = logging.getLogger(__name__)
T = TypeVar("T")

SECRETS_MAX = 512
SECRET_WATCH_TIMEOUT_S = 60
SECRETS_GRACE_S = 10.0
_POLL_UNTIL_COMPLETE_S = 0.02


class Discovery:
    """Starts with `start`, ends with `stop`. `key_prefix` is the prefix of the key digests (see auth)."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        router_name: str,
        *,
        key_prefix: bytes,
        on_restart: Callable[[str], None] | None = None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._router_name = router_name
        self._key_prefix = key_prefix
        self._on_restart = on_restart
        self._lock = threading.Lock()
        self._observed = Observed()
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._snapshot = Snapshot()
        self._problems: frozenset[str] = frozenset()
        self._core_synced_s: float | None = None
        self._secret_reflectors: dict[str, Reflector] = {}
        self._reflectors = [
            self._reflector(INFERENCE_SERVICE, self._on_service),
            self._reflector(ROUTER, self._on_router),
            self._reflector(TENANT, self._on_tenant),
            self._reflector(ENDPOINT_SLICE, self._on_slice),
        ]
        self._builder = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def start(self) -> Discovery:
        for reflector in self._reflectors:
            reflector.start()
        self._builder.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()
        for reflector in [*self._reflectors, *self._secret_reflectors.values()]:
            reflector.stop()

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def alive(self) -> bool:
        """Whether every thread that keeps the snapshot true is running. A cluster that is away does not matter."""
        followers = [*self._reflectors, *list(self._secret_reflectors.values())]
        return self._builder.is_alive() and all(reflector.alive for reflector in followers)

    def _reflector(
        self,
        kind: Kind,
        handler: Callable[[EventType, Manifest], None],
        *,
        field_selector: str = "",
        watch_timeout_s: int = 300,
    ) -> Reflector:
        on_restart = None if self._on_restart is None else partial(self._on_restart, kind.kind)
        return Reflector(
            self._client,
            kind,
            self._namespace,
            handler,
            field_selector=field_selector,
            on_restart=on_restart,
            watch_timeout_s=watch_timeout_s,
        )

    def _store(
        self,
        table: dict[str, T],
        event: EventType,
        manifest: Manifest,
        read: Callable[[Manifest], T | None],
    ) -> None:
        """Keep what `read` makes of the object; an object that cannot be read counts as absent."""
        name = str(manifest["metadata"]["name"])
        record = None
        if event != "DELETED":
            try:
                record = read(manifest)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                log.error("%s %s cannot be read and is ignored: %r", manifest.get("kind"), name, error)
        with self._lock:
            if record is None:
                table.pop(name, None)
            else:
                table[name] = record
        self._changed.set()

    def _on_service(self, event: EventType, manifest: Manifest) -> None:
        self._store(self._observed.services, event, manifest, records.read_service)

    def _on_router(self, event: EventType, manifest: Manifest) -> None:
        self._store(self._observed.routers, event, manifest, records.read_router)

    def _on_tenant(self, event: EventType, manifest: Manifest) -> None:
        self._store(self._observed.tenants, event, manifest, records.read_tenant)

    def _on_slice(self, event: EventType, manifest: Manifest) -> None:
        self._store(self._observed.slices, event, manifest, records.read_slice)

    def _on_secret(self, event: EventType, manifest: Manifest) -> None:
        # A Secret that nobody refers to any more may still report until its watch ends.
        with self._lock:
            followed = str(manifest["metadata"]["name"]) in self._secret_reflectors
        if followed:
            self._store(self._observed.secrets, event, manifest, partial(_key_digests, self._key_prefix))

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.wait(None if self._snapshot.complete else _POLL_UNTIL_COMPLETE_S)
            self._changed.clear()
            try:
                self._follow_secrets()
                complete = self._snapshot.complete or self._synced()
                with self._lock:
                    snapshot, problems = build(self._observed, self._router_name, complete=complete)
            except Exception:
                log.exception("A snapshot could not be built; the last one stays in use")
                self._stopped.wait(1.0)
                continue
            self._report(problems)
            self._snapshot = snapshot

    def _synced(self) -> bool:
        """Whether the initial lists are in. Secrets get a bounded grace: one that RBAC withholds must not stop all."""
        if not all(reflector.synced for reflector in self._reflectors):
            return False
        if self._core_synced_s is None:
            # Tenants of the last list may have named Secrets since this round's look at them.
            self._core_synced_s = time.monotonic()
            return False
        if all(reflector.synced for reflector in self._secret_reflectors.values()):
            return True
        return time.monotonic() - self._core_synced_s > SECRETS_GRACE_S

    def _follow_secrets(self) -> None:
        with self._lock:
            wanted = {ref.secret for tenant in self._observed.tenants.values() for ref in tenant.key_refs}
            if len(wanted) > SECRETS_MAX:
                log.error("Tenants name %d Secrets, %d are followed: split the namespace", len(wanted), SECRETS_MAX)
                wanted = set(sorted(wanted)[:SECRETS_MAX])
            for name in [name for name in self._secret_reflectors if name not in wanted]:
                self._secret_reflectors.pop(name).stop()
                self._observed.secrets.pop(name, None)
            for name in sorted(wanted - self._secret_reflectors.keys()):
                # Its first events wait for the lock, so they find it registered.
                self._secret_reflectors[name] = self._reflector(
                    SECRET,
                    self._on_secret,
                    field_selector=f"metadata.name={name}",
                    watch_timeout_s=SECRET_WATCH_TIMEOUT_S,
                ).start()

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._problems:
                log.warning("%s", problem)
        self._problems = frozenset(problems)


def _key_digests(prefix: bytes, secret: Manifest) -> dict[str, bytes]:
    """Digests of a Secret's values by data key. Surrounding white space is not part of a key; empty values are none."""
    digests: dict[str, bytes] = {}
    for name, value in (secret.get("data") or {}).items():
        try:
            text = base64.b64decode(value, validate=True).decode().strip()
        except (binascii.Error, UnicodeDecodeError, TypeError):
            continue
        if text:
            digests[name] = digest(prefix, text)
    return digests
