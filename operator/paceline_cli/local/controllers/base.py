"""Runs controllers on the store: level-triggered, woken by writes, each looking at the whole small world every time.

Why no queue per object: a laptop's store holds tens of objects, and a full pass costs less than the bookkeeping would.
A pass that changes nothing writes nothing, so controllers that wake one another come to rest.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from paceline_api.kube import Kind, KubeError
from paceline_cli.local.store import ObjectStore

_RETRY_S = 1.0
_log = logging.getLogger(__name__)


class Controller(Protocol):
    """One control loop. `kinds`: writes to these wake it."""

    kinds: tuple[Kind, ...]

    def reconcile(self) -> float | None:
        """Brings the store one step nearer to what is wanted; seconds until it must look again, None = at a write."""
        ...


class ControllerManager:
    """`start()` in a running event loop; `await stop()`. Controllers run one after the other on that loop."""

    def __init__(self, store: ObjectStore, controllers: Sequence[Controller]) -> None:
        self._store = store
        self._controllers = controllers
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """One task a controller."""
        self._tasks = [asyncio.ensure_future(self._run(controller)) for controller in self._controllers]

    async def stop(self) -> None:
        """After this nothing is written any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, controller: Controller) -> None:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def written(kind: Kind) -> None:
            if kind in controller.kinds:
                with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                    loop.call_soon_threadsafe(wake.set)

        unsubscribe = self._store.subscribe(written)
        try:
            while True:
                wake.clear()
                delay = _attempt(controller)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), delay)
        finally:
            unsubscribe()


def _attempt(controller: Controller) -> float | None:
    try:
        return controller.reconcile()
    except KubeError as error:
        _log.warning("%s: %s; trying again", type(controller).__name__, error)
    except Exception:
        # A controller that dies would leave a fleet that silently no longer follows its spec.
        _log.exception("%s failed; trying again", type(controller).__name__)
    return _RETRY_S
