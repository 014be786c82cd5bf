"""The engine as the HTTP layer sees it: state and admission.

States: loading -> ready -> draining, and failed from anywhere; a ready engine may sleep, its KV released. In-flight
counts accepted HTTP requests until their answer is written, so a drain that waits for zero cuts nobody off. No HTTP
types here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from paceline_engine.chat_template import ChatTemplate
from paceline_engine.core_client import CoreClient
from paceline_engine.messages import CoreReady
from paceline_engine.metrics import EngineMetrics
from paceline_engine.models.loader import LoadedModel
from paceline_engine.server.errors import RETRY_SOON_SECONDS, invalid, unavailable
from paceline_engine.server.kv_events import EventLog
from paceline_engine.structured.compiler import GrammarCompiler
from paceline_engine.tokenizer import Tokenizer

# Before the process is called dead, requests go elsewhere.
READY_SILENCE_SECONDS = 8.0


class State(StrEnum):
    """Where the process is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What exists once the model is loaded. tool_format: how the model writes tool calls; None if it does not.

    auto_tools: whether the model may decide to call a tool, as tool_choice "auto" lets it. make_template: compiles a
    template that a request brings; None where requests may not.
    """

    model: LoadedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    core: CoreClient
    ready: CoreReady
    compiler: GrammarCompiler
    tool_format: str | None = None
    auto_tools: bool = True
    make_template: Callable[[str], ChatTemplate] | None = None


class Engine:
    """State and admission of one model. All methods run on the event loop."""

    def __init__(
        self,
        *,
        model_name: str,
        metrics: EngineMetrics,
        progress_timeout: float,
        config_hash: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.wall_clock = wall_clock
        self.model_name = model_name
        self.config_hash = config_hash
        self.created = self.created_now()
        self.metrics = metrics
        self.clock = clock
        self.state = State.LOADING
        self.failure = ""
        # Of a drain: "running", "done" or "failed"; as `EngineLoad.kv_flush`.
        self.kv_flush = ""
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        # Loaded LoRA adapters, served as models: name to when they were loaded, Unix seconds.
        self.adapters: dict[str, int] = {}
        self.events = EventLog(secrets.token_hex(8))
        self._serving: Serving | None = None
        self._progress_timeout = progress_timeout

    def created_now(self) -> int:
        """Unix seconds, for `created` fields."""
        return int(self.wall_clock())

    @property
    def serving(self) -> Serving:
        """The loaded model. Raises ApiError (503) before that."""
        if self._serving is None:
            raise unavailable("the model is still loading: try again later", "loading")
        return self._serving

    @property
    def core(self) -> CoreClient | None:
        """The core, once it serves."""
        return self._serving.core if self._serving is not None else None

    def set_serving(self, serving: Serving) -> None:
        """The model is loaded; a drain that began meanwhile stays."""
        self._serving = serving
        if self.state is State.LOADING:
            self.state = State.READY

    def fail(self, reason: str) -> None:
        """The core is gone: nothing is served any more."""
        self.state = State.FAILED
        self.failure = reason

    def not_live(self) -> str | None:
        """Why the process should be restarted, or None. A core that says nothing makes no progress."""
        if self.state is State.FAILED:
            return self.failure
        return self._silent_for(self._progress_timeout)

    def _silent_for(self, seconds: float) -> str | None:
        core = self.core
        if core is not None and core.silent_seconds() > seconds:
            return f"no progress of the engine core for {core.silent_seconds():.0f} s"
        return None

    def not_ready(self) -> str | None:
        """Why a request would be refused now, or None."""
        if self.state is not State.READY:
            return self.state.value
        return "asleep" if self.asleep else self._silent_for(min(READY_SILENCE_SECONDS, self._progress_timeout))

    @property
    def asleep(self) -> bool:
        """Whether the KV is released; nothing is served until it is woken."""
        core = self.core
        return core is not None and core.stats.asleep

    def refuse_unless_ready(self) -> None:
        """Raises ApiError (503) while nothing is served; cheap, so it comes before a body is read."""
        if self.state is not State.READY:
            self.metrics.on_rejected(self.state.value)
            raise unavailable(
                f"the engine is {self.state.value}: use another replica or try again later", self.state.value
            )
        if self.asleep:
            self.metrics.on_rejected("asleep")
            raise unavailable("the engine is asleep: wake it with POST /wake_up on its admin port", "asleep")

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Account for one HTTP request of `count` prompts. Raises ApiError (503) if it can't be served here and now."""
        self.refuse_unless_ready()
        if count > self.serving.core.max_live:
            most = self.serving.core.max_live
            raise invalid(
                f"{count} choices are asked for and this engine holds at most {most} at once: ask for fewer", "n"
            )
        if not self.serving.core.room_for(count):
            self.metrics.on_rejected("queue_full")
            raise unavailable("the queue of this engine is full: try again later", "queue_full", RETRY_SOON_SECONDS)
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self.idle.set()

    def start_draining(self) -> None:
        """Admit nothing from now on."""
        if self.state in (State.LOADING, State.READY):
            self.state = State.DRAINING
            self.kv_flush = "running"


def draw_seed() -> int:
    """A seed for a sampled request that named none; the core itself has no randomness."""
    return secrets.randbits(63)
