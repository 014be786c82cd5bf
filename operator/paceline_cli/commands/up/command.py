"""The whole run of `paceline up`: check everything, claim the port, start, show, stop. Exit code 0 after Ctrl-C.

Everything that can be wrong with files, packages, models or the port ends the command before a process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline_api.kube import KubeError, Manifest
from paceline_api.v1alpha1 import InferenceService
from paceline_cli.commands.up import prerequisites
from paceline_cli.commands.up.claim import HOST, Claim, default_state_dir
from paceline_cli.commands.up.objects import Typed, anonymous_router, local_objects, router_names
from paceline_cli.commands.up.screen import Screen, make_screen
from paceline_cli.commands.up.view import View, curl_command
from paceline_cli.commands.validate import load_valid
from paceline_cli.errors import EXIT_DONE, EXIT_FAILED, BadInput, CliError

if TYPE_CHECKING:
    from paceline_cli.commands.up.runtime import Runtime

DEFAULT_FILE = Path("manifests/examples/smollm2.yaml")
REDRAW_S = 0.1
"""Shortest time between two redraws."""
STOPPING_S = 5.0
"""While pods finish their requests, they are named this often."""
TICK_S = 1.0
"""Ages and the last lines of logs are looked at this often."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Options:
    """Flags of the command. `port` 0 = any free one; `state_dir` None = the user's default."""

    port: int
    state_dir: Path | None
    tty: bool | None
    json_lines: bool


def run(files: Sequence[str], options: Options) -> int:
    """Returns the exit code; raises BadInput with every line that says what to mend."""
    verdict = load_valid(_files(files))
    namespace, manifests = local_objects(verdict.objects, verdict.typed)
    programs = Path(sys.executable).parent
    missing = prerequisites.missing_packages() + prerequisites.missing_programs(programs)
    missing += prerequisites.missing_for_stores(verdict.typed, programs)
    missing += prerequisites.missing_engines(verdict.typed, programs)
    # Models are read by packages that may be missing.
    missing = missing or prerequisites.missing_models(verdict.typed)
    if missing:
        raise BadInput(*missing)
    claim = Claim(options.state_dir or default_state_dir(os.environ), options.port)
    try:
        plan = _Plan(namespace, manifests, verdict.typed, claim)
        tty = sys.stdout.isatty() if options.tty is None else options.tty
        screen = make_screen(json_lines=options.json_lines, tty=tty)
        try:
            return asyncio.run(_Session(plan, screen, _process_start_s()).run())
        finally:
            screen.close()
    finally:
        claim.release()


def _process_start_s() -> float:
    """When this process began, on the monotonic clock: start-up time includes Python's own where the system tells."""
    now_s = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        # proc(5): field 22, in clock ticks since boot; the name in field 2 may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return now_s - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return now_s


def _files(files: Sequence[str]) -> Sequence[str]:
    if files:
        return files
    if not DEFAULT_FILE.exists():
        raise BadInput(f"no FILE was given and {DEFAULT_FILE} is not in this folder; name a file")
    return [str(DEFAULT_FILE)]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to run and where."""

    namespace: str
    manifests: list[Manifest]
    typed: Typed
    claim: Claim

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.claim.port}/v1"

    def invitation(self) -> str:
        """What to try first."""
        router = router_names(self.typed)[0]
        models = [r.served_name() for _, r in self.typed if isinstance(r, InferenceService)]
        return curl_command(self.url, models[0], needs_key=not anonymous_router(self.typed, router))


class _Session:
    """One run between start and stop, on the event loop."""

    def __init__(self, plan: _Plan, screen: Screen, began_s: float) -> None:
        self._plan = plan
        self._screen = screen
        self._began_s = began_s
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._signals = 0
        self._exit_code = EXIT_DONE
        self._runtime: Runtime | None = None
        self._said_ready = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        from paceline_cli.commands.up.runtime import Runtime

        runtime = self._runtime = Runtime(
            self._plan.claim, self._plan.namespace, router_names(self._plan.typed), self._changed.set
        )
        try:
            await self._start(runtime)
            await self._watch(runtime)
        finally:
            await self._finish(runtime)
        self._say("stopped", f"stopped; logs are in {runtime.log_dir}")
        return self._exit_code

    async def _start(self, runtime: Runtime) -> None:
        try:
            await runtime.start(self._plan.manifests)
        except (KubeError, OSError) as error:
            raise CliError(f"cannot start: {error}") from error

    async def _finish(self, runtime: Runtime) -> None:
        self._say("stopping", "stopping; Ctrl-C again does not wait for requests in flight")
        stopping = asyncio.ensure_future(runtime.stop())
        while not (await asyncio.wait({stopping}, timeout=STOPPING_S))[0]:
            names = sorted(name for _, name in runtime.pods)
            self._say("draining", f"still finishing requests: {', '.join(names)}", pods=names)
        await stopping

    def _signalled(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1 and self._runtime is not None:
            self._runtime.hurry()

    async def _watch(self, runtime: Runtime) -> None:
        while not self._stop.is_set():
            self._changed.clear()
            self._show(runtime.view())
            await self._wait(TICK_S, self._changed, self._stop)
            await self._wait(REDRAW_S, self._stop)

    async def _wait(self, limit_s: float, *events: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _show(self, view: View) -> None:
        elapsed_s = time.monotonic() - self._began_s
        try:
            self._screen.show(view, elapsed_s)
        except OSError:
            # Nobody reads any more, as in `paceline up | head`: stop rather than run unseen.
            self._exit_code = EXIT_FAILED
            self._stop.set()
        if view.ready and not self._said_ready:
            self._said_ready = True
            self._welcome(elapsed_s)

    def _welcome(self, elapsed_s: float) -> None:
        assert self._runtime is not None
        kubeconfig, url = self._runtime.kubeconfig, self._plan.url
        text = (
            f"\nReady in {elapsed_s:.1f} s: {url}\n\n{self._plan.invitation()}\n\n"
            f"Objects can be changed while they run: export KUBECONFIG={kubeconfig}\n"
            "and use kubectl get, kubectl delete, kubectl patch --type merge,\n"
            "or edit the file and kubectl apply --server-side --validate=false -f FILE\n"
            "(with --force-conflicts where a patch came in between).\n"
            "Not served here: kubectl scale, client-side apply, other types of patch, the columns of kubectl get.\n"
            f"Logs: {self._runtime.log_dir}\n"
        )
        self._say("ready", text, url=url, kubeconfig=str(kubeconfig), ready_s=round(elapsed_s, 3))

    def _say(self, event: str, text: str, **facts: object) -> None:
        try:
            self._screen.say(event, text, **facts)
        except OSError:
            self._stop.set()
