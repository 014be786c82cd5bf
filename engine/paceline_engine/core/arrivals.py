"""What becomes of a request on arrival: made ready for the queue, or refused with one line.

Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_engine.core.admission import Refusal, SchedulerConfig, why_impossible, why_too_late
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.live import LiveRequests
from paceline_engine.core.request import Request
from paceline_engine.core.speed import StepSpeed
from paceline_engine.messages import AddRequest


class Arrivals:
    """Numbers requests and knows what they may ask for. asleep: all are refused. adapters: (name, content's digest).

    num_deadline_refusals, num_queue_refusals: requests refused for these reasons.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, live: LiveRequests, speed: StepSpeed, eos_token_ids: Iterable[int]
    ) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.asleep = False
        self.adapters: dict[str, str] = {}
        self.count = 0
        self.num_deadline_refusals = 0
        self.num_queue_refusals = 0
        self._config = config
        self._kv = kv
        self._live = live
        self._speed = speed

    def request_of(self, message: AddRequest, now: float) -> Request:
        """The message as a request, numbered."""
        self.count += 1
        return Request.from_message(
            message,
            max_model_len=self._config.max_model_len,
            eos_token_ids=self.eos_token_ids,
            adapter_digest=self.adapters.get(message.adapter or "", ""),
            arrival=self.count,
            now=now,
        )

    def why_refused(self, request: Request, now: float) -> Refusal | None:
        """Why a request isn't queued, or None."""
        if self.asleep:
            return "asleep", "the engine sleeps; wake it first"
        if request.adapter is not None and request.adapter not in self.adapters:
            return "invalid", f"the adapter {request.adapter!r} isn't loaded"
        problem = why_impossible(request, self._config, self._kv)
        if problem is not None:
            return "invalid", problem
        limit = self._config.max_num_waiting
        if len(self._live.waiting) >= limit:
            self.num_queue_refusals += 1
            return "queue_full", f"the engine's queue is full ({limit} requests); try again later"
        if request.ttft_deadline is None and request.e2e_deadline is None:
            return None
        ahead = [*self._live.running, *self._live.waiting.before(request)]
        problem = why_too_late(request, ahead, self._kv, self._speed, now)
        self.num_deadline_refusals += problem is not None
        return None if problem is None else ("deadline", problem)

    def set_adapter(self, name: str, digest: str) -> None:
        """Requests may name this adapter from now on; its content's `digest` becomes part of block identity."""
        self.adapters[name] = digest

    def remove_adapter(self, name: str) -> None:
        """Requests that name this adapter are refused from now on. Raises ValueError while one is live."""
        users = sum(1 for request in self._live.by_id.values() if request.adapter == name)
        if users:
            raise ValueError(f"{users} requests use the adapter {name!r}; try again when they have ended")
        self.adapters.pop(name, None)
