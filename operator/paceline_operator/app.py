"""Composition root: client, cache, queue, workers, informer. Usable in-process, without kopf and without a cluster.

    operator = Operator(client, Settings())
    operator.start()          # lists everything, then watches
    ...
    operator.stop()

The operator does not elect a leader and opens no port: `cli` does, around it.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from paceline_api.kube import KubeClient, KubeError
from paceline_operator.cache import Cache
from paceline_operator.events import EventRecorder
from paceline_operator.execute import Executor
from paceline_operator.feed import Feed
from paceline_operator.informer import InformerFactory, Sink, WatchInformer
from paceline_operator.metrics import OperatorMetrics
from paceline_operator.observe import Observer
from paceline_operator.planner.model import Key
from paceline_operator.reconcile import ReconcileFailed, Reconciler
from paceline_operator.settings import Clock, Settings
from paceline_operator.workqueue import Schedule, WorkQueue

log = logging.getLogger(__name__)

SYSTEM_CLOCK = Clock(wall=time.time, monotonic=time.monotonic)
_TICK_S = 1.0
_TOKEN_BYTES = 32


def new_token() -> str:
    """A random internal token."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


class Operator:
    """Reconciles until stopped. One instance a life: start once, stop once."""

    def __init__(
        self,
        client: KubeClient,
        settings: Settings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        informer: InformerFactory | None = None,
        registry: CollectorRegistry | None = None,
        token_source: Callable[[], str] = new_token,
        randomness: Callable[[], float] = random.random,
    ) -> None:
        self.metrics = OperatorMetrics(registry or CollectorRegistry())
        self.cache = Cache()
        self.queue: WorkQueue[Key] = WorkQueue(Schedule(randomness, keys_max=settings.keys_max), clock.monotonic)
        self.metrics.watch_depth(lambda: self.queue.depth)
        self._client = client
        self._settings = settings
        self._clock = clock
        self._randomness = randomness
        self._feed = Feed(self.cache, self.queue, self.metrics)
        self._reconciler = Reconciler(
            Observer(client, self.cache, token_source),
            Executor(client, self.cache, self.metrics),
            EventRecorder(client, clock.wall),
            settings,
            clock,
        )
        factory = informer or self._watch_informer
        self._informer = factory(self._feed.event)
        self._stopping = threading.Event()
        self._beats: dict[str, float] = {}
        self._failure: str | None = None
        self._threads: list[threading.Thread] = []

    def _watch_informer(self, sink: Sink) -> WatchInformer:
        return WatchInformer(self._client, self._settings.namespace, sink)

    def start(self) -> None:
        """Lists everything, then starts informer and workers. Raises KubeError if the lists fail."""
        self.resync()
        self._informer.start()
        names = [f"reconcile-{number}" for number in range(self._settings.workers)]
        self._threads = [threading.Thread(target=self._work, name=name, args=(name,), daemon=True) for name in names]
        self._threads.append(threading.Thread(target=self._resync_forever, name="resync", daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Reconciles in progress are finished; nothing is written after it returns, unless they exceed the timeout."""
        self._stopping.set()
        self.queue.close()
        self._informer.stop(self._settings.stop_timeout_s)
        for thread in self._threads:
            thread.join(self._settings.stop_timeout_s)

    def resync(self) -> None:
        """Compares the cache with real lists and looks at every key again. Raises KubeError."""
        self._feed.resync(self._client, self._settings.namespace, self._resync_beat)

    @property
    def idle(self) -> bool:
        """No key is due and none is being worked on."""
        return self.queue.idle

    @property
    def problem(self) -> str | None:
        """Why this process should be started again; None while it makes progress."""
        if not self._informer.alive:
            return "the informer has ended"
        if self._failure is not None:
            return self._failure
        now = self._clock.monotonic()
        for name, beat in list(self._beats.items()):
            if now - beat > self._settings.heartbeat_timeout_s:
                return f"thread {name} has made no progress for {now - beat:.0f} s"
        return None

    def _work(self, name: str) -> None:
        while not self._stopping.is_set():
            self._beats[name] = self._clock.monotonic()
            key = self.queue.get(_TICK_S)
            if key is not None:
                self._reconcile(key)

    def _reconcile(self, key: Key) -> None:
        began = self._clock.monotonic()
        result = "ok"
        try:
            requeue_after_s = self._reconciler.reconcile(key)
            self.queue.forget(key)
            if requeue_after_s is not None:
                self.queue.add_after(key, requeue_after_s)
        except (ReconcileFailed, KubeError) as error:
            result = "error"
            log.warning("%s failed, again in %.1f s: %s", key, self.queue.retry(key), error)
        except Exception:
            result = "error"
            log.exception("%s failed, again in %.1f s", key, self.queue.retry(key))
        finally:
            self.queue.done(key)
            self.metrics.reconciled(key.kind, result, self._clock.monotonic() - began)

    def _resync_beat(self) -> None:
        self._beats["resync"] = self._clock.monotonic()

    def _wait(self, seconds: float) -> bool:
        """True once the operator stops, False after the time. Beats while it waits."""
        end = self._clock.monotonic() + seconds
        while (left := end - self._clock.monotonic()) > 0:
            self._resync_beat()
            if self._stopping.wait(min(_TICK_S, left)):
                return True
        return self._stopping.is_set()

    def _resync_forever(self) -> None:
        wait_s = min(self._settings.first_resync_s, self._settings.resync_s)
        while not self._wait(wait_s):
            try:
                self.resync()
            except KubeError as error:
                log.warning("Resync failed, the next one will tell: %s", error)
            except Exception as error:
                # Without resyncs the operator would be wrong and not know it; started again it begins afresh.
                log.exception("The resync has ended")
                self._failure = f"the resync has ended: {error!r}"
                return
            # Spread over +-20 %, so that the operators of many namespaces do not list at the same time.
            wait_s = self._settings.resync_s * (0.8 + 0.4 * self._randomness())
