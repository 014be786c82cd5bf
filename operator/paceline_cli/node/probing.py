"""Runs the probes of one run of a container against the clock of the event loop.

Order as in a kubelet: while a startup probe has not passed, liveness and readiness wait; initial delays count from the
start of the container. Verdicts come from `probes.ProbeState`; what they mean is the caller's business.
"""

import asyncio
import logging
from collections.abc import Callable

from paceline_cli.node.pod import Container, Probe
from paceline_cli.node.prober import Target, check
from paceline_cli.node.probes import ProbeKind, ProbeState, Verdict

_log = logging.getLogger(__name__)


class Probing:
    """Cancel the task of `run` when the container has ended.

    `on_started()` once; `on_ready(bool)` on each change; `on_kill(message, grace)` when startup or liveness has failed.
    """

    def __init__(
        self,
        container: Container,
        target: Target,
        on_started: Callable[[], None],
        on_ready: Callable[[bool], None],
        on_kill: Callable[[str, int | None], None],
    ) -> None:
        self._container = container
        self._target = target
        self._on_started = on_started
        self._on_ready = on_ready
        self._on_kill = on_kill
        self._began = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Returns when nothing is left to probe."""
        container = self._container
        if container.startup and not await self._loop(container.startup, ProbeKind.STARTUP):
            return
        self._on_started()
        if container.readiness is None:
            self._on_ready(True)
        async with asyncio.TaskGroup() as group:
            if container.readiness:
                group.create_task(self._loop(container.readiness, ProbeKind.READINESS))
            if container.liveness:
                group.create_task(self._loop(container.liveness, ProbeKind.LIVENESS))

    async def _loop(self, probe: Probe, kind: ProbeKind) -> bool:
        """Startup: True when it has passed. Startup and liveness: False after asking for the kill."""
        loop = asyncio.get_running_loop()
        state = ProbeState(kind, probe.failure_threshold, probe.success_threshold)
        await asyncio.sleep(max(0.0, self._began + probe.initial_delay - loop.time()))
        while True:
            next_at = loop.time() + probe.period
            ok, message = await check(probe.action, self._target, probe.timeout)
            verdict = state.record(ok)
            if verdict is Verdict.FAILED:
                _log.info("container %s: %s probe failed: %s", self._container.name, kind.value.lower(), message)
            if kind is ProbeKind.READINESS and verdict is not Verdict.UNCHANGED:
                self._on_ready(state.passed)
            elif kind is ProbeKind.STARTUP and state.passed:
                return True
            elif kind is not ProbeKind.READINESS and verdict is Verdict.FAILED:
                self._on_kill(f"{kind.value} probe failed: {message}", probe.grace)
                return False
            await asyncio.sleep(max(0.0, next_at - loop.time()))
