"""One container of a pod: runs its process, restarts it with backoff, ends it in order.

Restart policy, backoff, preStop and grace follow the kubelet; the backoff is 1 s doubling to 60 s (a kubelet's 10 s to
300 s is for shared clusters) and starts over after a run of `BACKOFF_RESET_S`. A run is ended by one path only, in
`_once`, whoever asked for it: the pod's deletion or a failed probe.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline_cli.node.base import Command, ContentSource, Mount, PodEnvironment
from paceline_cli.node.expand import ConfigError, container_env, expand_all
from paceline_cli.node.guard import Guard
from paceline_cli.node.logs import LogFile, tail
from paceline_cli.node.pod import Container, Pod, PodRefused
from paceline_cli.node.prober import Target, check
from paceline_cli.node.probing import Probing
from paceline_cli.node.process import Exit, Process, run_to_end
from paceline_cli.node.status import ContainerView, Running, Terminated, Waiting

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0
BACKOFF_RESET_S = 120.0
_CONFIG_RETRY_S = 2.0
_SHUTDOWN_MIN_S = 2.0
"""A kubelet gives at least this long after preStop, even when preStop used up the grace period."""
_START_ERROR = 128
"""Exit code that container runtimes report when the process could not be started."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeServices:
    """What every container of a node shares. `now` gives RFC 3339 time."""

    content: ContentSource
    guard: Guard
    capacity: Mapping[str, str]
    now: Callable[[], str]


class ContainerRunner:
    """`run()` until the container is finished for good; `stop()` ends it. `view` is its current status."""

    def __init__(
        self,
        container: Container,
        pod: Pod,
        environment: PodEnvironment,
        mounts: tuple[Mount, ...],
        services: NodeServices,
        log_path: Path,
        changed: Callable[[], None],
        *,
        init: bool = False,
    ) -> None:
        self.container = container
        self.log_path = log_path
        self.view = ContainerView(container.name, container.image, Waiting("ContainerCreating"))
        self._pod = pod
        self._environment = environment
        self._mounts = mounts
        self._services = services
        self._changed = changed
        self._init = init
        self._stopping = False
        self._forced = False
        self._deadline: float | None = None
        self._poke = asyncio.Event()
        self._backoff = BACKOFF_FIRST_S
        self._runs = 0
        self._env: dict[str, str] = {}

    async def run(self) -> None:
        """Never raises for what the container does."""
        while not self._stopping:
            try:
                command = await self._command()
            except (ConfigError, PodRefused) as error:
                self._update(state=Waiting("CreateContainerConfigError", str(error)))
                await self._pause(_CONFIG_RETRY_S)
                continue
            except OSError as error:
                self._not_started(str(error))
            else:
                if self._stopping:
                    break
                await self._once(command)
            if self._stopping or not self._restarts():
                break
            await self._back_off()

    def stop(self, grace: float) -> None:
        """Asks for the end within `grace` seconds; a second call may only shorten it. Then await `run`."""
        self._stopping = True
        self._forced = self._forced or grace <= 0
        self._end_within(grace)

    def _end_within(self, grace: float) -> None:
        deadline = asyncio.get_running_loop().time() + grace
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._poke.set()

    def _update(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)
        self._changed()

    async def _command(self) -> Command:
        services = self._services
        self._env = await container_env(
            self.container, self._pod, self._environment, services.content, services.capacity
        )
        argv = expand_all((*self.container.command, *self.container.args), self._env)
        return self._isolated(argv)

    def _isolated(self, argv: tuple[str, ...]) -> Command:
        command = Command(argv, self._env, self.container.working_dir or None)
        return self._environment.command(self.container, command, self._mounts)

    async def _exec(self, argv: tuple[str, ...], timeout_s: float) -> tuple[int, str]:
        return await run_to_end(self._isolated(argv), self._services.guard, timeout_s)

    async def _once(self, command: Command) -> None:
        started_at, loop = self._services.now(), asyncio.get_running_loop()
        began = loop.time()
        log = LogFile(self.log_path)
        try:
            no_new = self.container.security.allow_privilege_escalation is False
            process = await Process.start(command, log.write, self._services.guard, no_new_privileges=no_new)
        except OSError as error:
            log.close()
            self._not_started(str(error))
            return
        self._runs += 1
        container_id = f"process://{self._pod.uid}-{self.container.name}-{self._runs}-{process.pid}"
        self._update(state=Running(started_at), container_id=container_id)
        try:
            ended = await self._attend(process)
        finally:
            process.kill()
            log.close()
        if loop.time() - began >= BACKOFF_RESET_S:
            self._backoff = BACKOFF_FIRST_S
        self._update(
            state=self._terminated(ended, started_at, container_id), ready=self._init and not ended.code, started=False
        )

    async def _attend(self, process: Process) -> Exit:
        """Probes the process until it ends, or ends it when asked to."""
        target = Target(self._environment.pod_ip, self._environment.port, self.container, self._exec)
        probing: asyncio.Task[None] | None = None
        if not self._init:
            probes = Probing(self.container, target, self._on_started, self._on_ready, self._on_kill)
            probing = asyncio.ensure_future(probes.run())
        try:
            await self._until(process, asked=True)
            if process.alive:
                await self._terminate(process, target)
            return await process.ended
        finally:
            if probing is not None:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)

    async def _until(
        self, process: Process, hook: "asyncio.Task[tuple[bool, str]] | None" = None, *, asked: bool = False
    ) -> None:
        """Returns at the end of the process or of `hook`, or at the deadline; `asked`: once there is a deadline."""
        loop = asyncio.get_running_loop()
        while process.alive and not (hook and hook.done()):
            self._poke.clear()
            timeout = None if self._deadline is None else self._deadline - loop.time()
            if timeout is not None and (asked or timeout <= 0):
                return
            poke = asyncio.ensure_future(self._poke.wait())
            waiting: set[asyncio.Future[Any]] = {process.ended, poke, *([hook] if hook else [])}
            await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            poke.cancel()

    async def _terminate(self, process: Process, target: Target) -> None:
        loop = asyncio.get_running_loop()
        grace = (self._deadline or 0.0) - loop.time()
        if self.container.pre_stop and grace > 0:
            hook = asyncio.ensure_future(check(self.container.pre_stop, target, grace))
            await self._until(process, hook)
            await self._finish_hook(hook)
            if not self._forced:
                self._deadline = max(self._deadline or 0.0, loop.time() + _SHUTDOWN_MIN_S)
        process.terminate()
        await self._until(process)
        process.kill()

    async def _finish_hook(self, hook: "asyncio.Task[tuple[bool, str]]") -> None:
        if hook.done():
            ok, message = hook.result()
            if not ok:
                _log.warning("container %s: preStop failed: %s", self.container.name, message)
            return
        hook.cancel()
        await asyncio.gather(hook, return_exceptions=True)

    def _on_started(self) -> None:
        self._update(started=True)

    def _on_ready(self, ready: bool) -> None:
        self._update(ready=ready)

    def _on_kill(self, message: str, grace: int | None) -> None:
        if not self._stopping:
            _log.warning("container %s will be restarted: %s", self.container.name, message)
            self._end_within(self._pod.grace if grace is None else grace)

    def _terminated(self, ended: Exit, started_at: str, container_id: str) -> Terminated:
        message = tail(self.log_path) if ended.code and self.container.log_tail_on_error else ""
        reason = "Error" if ended.code else "Completed"
        now = self._services.now()
        return Terminated(ended.code, reason, started_at, now, ended.signal, message, container_id)

    def _not_started(self, message: str) -> None:
        now = self._services.now()
        self._update(state=Terminated(_START_ERROR, "StartError", now, now, message=message), ready=False)

    def _restarts(self) -> bool:
        state = self.view.state
        failed = isinstance(state, Terminated) and state.exit_code != 0
        if self._init:
            return failed and self._pod.restart_policy != "Never"
        return self._pod.restart_policy == "Always" or (failed and self._pod.restart_policy == "OnFailure")

    async def _back_off(self) -> None:
        """Between two runs: reported as CrashLoopBackOff with the last run in lastState."""
        delay, self._backoff = self._backoff, min(self._backoff * 2, BACKOFF_MAX_S)
        self._deadline = None
        state = self.view.state
        assert isinstance(state, Terminated)
        message = f"back-off {delay:g}s restarting failed container={self.container.name} pod={self._pod.name}"
        self._update(state=Waiting("CrashLoopBackOff", message), last_state=state)
        await self._pause(delay)
        if self._stopping:
            # The pod ends here: what is reported last is how the container ended.
            self._update(state=state)
        else:
            self.view = replace(self.view, restart_count=self.view.restart_count + 1)

    async def _pause(self, delay: float) -> None:
        self._poke.clear()
        if self._stopping:
            return
        try:
            await asyncio.wait_for(self._poke.wait(), delay)
        except TimeoutError:
            return
