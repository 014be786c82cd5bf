"""The engine as the HTTP layer sees it: state, admission, and one request from token ids to text.

States: loading -> ready -> draining, and failed from anywhere. In-flight counts accepted HTTP requests until their
answer is written, so a drain that waits for zero cuts nobody off. No HTTP types here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from paceline_engine.chat_template import ChatTemplate
from paceline_engine.core_client import Arrival, CoreClient, CoreError, QueueFull, RequestStream
from paceline_engine.detokenizer import OutputText
from paceline_engine.messages import AddRequest, CoreReady, SamplingParams
from paceline_engine.metrics import EngineMetrics
from paceline_engine.models.loader import LoadedModel
from paceline_engine.server.errors import RETRY_SOON_SECONDS, internal, unavailable
from paceline_engine.tokenizer import Tokenizer


class State(StrEnum):
    """Where the process is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What exists once the model is loaded."""

    model: LoadedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    core: CoreClient
    ready: CoreReady


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt to complete. `arrived` is in the engine's clock."""

    token_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    salt: str
    arrived: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain: text, tokens so far, and at the end why ("stop" or "length")."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None


@dataclass(slots=True)
class _Timing:
    """Arrival times of one request's tokens, seconds in the engine's clock."""

    arrived: float
    first: float | None = None
    last: float = field(default=0.0)


class Engine:
    """State and admission of one model. All methods run on the event loop."""

    def __init__(
        self,
        *,
        model_name: str,
        metrics: EngineMetrics,
        progress_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.wall_clock = wall_clock
        self.model_name = model_name
        self.created = self.created_now()
        self.metrics = metrics
        self.clock = clock
        self.state = State.LOADING
        self.failure = ""
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
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
        core = self.core
        if core is not None and core.silent_seconds() > self._progress_timeout:
            return f"no progress of the engine core for {core.silent_seconds():.0f} s"
        return None

    def not_ready(self) -> str | None:
        """Why a request would be refused now, or None."""
        return self.state.value if self.state is not State.READY else self.not_live()

    def refuse_unless_ready(self) -> None:
        """Raises ApiError (503) while nothing is served; cheap, so it comes before a body is read."""
        if self.state is not State.READY:
            self.metrics.on_rejected(self.state.value)
            raise unavailable(
                f"the engine is {self.state.value}: use another replica or try again later", self.state.value
            )

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Account for one HTTP request of `count` prompts. Raises ApiError (503) if it can't be served here and now."""
        self.refuse_unless_ready()
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

    async def generate(self, index: int, prompt: Prompt) -> AsyncGenerator[Delta, None]:
        """Run one prompt; the last delta has a finish_reason. Close the iterator to abort.

        Raises ApiError if the request ends without a regular reason: the core failed, or the engine was stopped.
        """
        stream = self._submit(prompt)
        output = OutputText(self.serving.tokenizer, prompt.stops)
        timing = _Timing(prompt.arrived)
        reason = "abort"
        try:
            while True:
                text = ""
                for arrival in await stream.next():
                    text += self._take(arrival, prompt, output, timing)
                    ended = "stop" if output.stopped else arrival.output.finish_reason
                    if ended is not None:
                        reason = ended
                        break
                else:
                    if text:
                        yield Delta(index, text, output.num_tokens)
                    continue
                yield self._last_delta(index, text, output, reason, arrival.output.error)
                return
        finally:
            stream.close()
            decode_seconds = timing.last - timing.first if timing.first is not None else 0.0
            self.metrics.on_finished(reason, self.clock() - prompt.arrived, output.num_tokens, decode_seconds)

    def _submit(self, prompt: Prompt) -> RequestStream:
        request = AddRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt.token_ids),
            sampling=prompt.sampling,
            salt=prompt.salt,
        )
        try:
            stream = self.serving.core.submit(request)
        except QueueFull as error:
            self.metrics.on_rejected("queue_full")
            raise unavailable("the queue of this engine is full", "queue_full", RETRY_SOON_SECONDS) from error
        except CoreError as error:
            raise internal(str(error)) from error
        self.metrics.on_accepted(len(prompt.token_ids))
        return stream

    def _take(self, arrival: Arrival, prompt: Prompt, output: OutputText, timing: _Timing) -> str:
        """Text of one output of the core; stops at a stop string, so tokens behind it count nowhere."""
        ids, finish = arrival.output.new_token_ids, arrival.output.finish_reason
        text, before = "", output.num_tokens
        for position, token_id in enumerate(ids):
            ends_output = finish == "stop" and position == len(ids) - 1
            text += output.push(token_id, silent=ends_output)
            if output.stopped:
                break
        if output.num_tokens > before:
            self.metrics.on_tokens(output.num_tokens - before)
            if timing.first is None:
                timing.first = arrival.at
                self.metrics.on_first_token(arrival.at - prompt.arrived)
            else:
                self.metrics.on_next_token(arrival.at - timing.last)
            timing.last = arrival.at
        return text

    def _last_delta(self, index: int, text: str, output: OutputText, reason: str, error: str | None) -> Delta:
        if reason == "abort":
            raise unavailable("the engine was stopped before the answer was complete", "aborted")
        if reason == "error":
            raise internal(error or "the engine core failed")
        text += output.flush()
        return Delta(index, text, output.num_tokens, "stop" if output.stopped else reason)


def draw_seed() -> int:
    """A seed for a sampled request that named none; the core itself has no randomness."""
    return secrets.randbits(63)
