"""Every live request, in exactly one of two queues: those that run and hold blocks, and those that wait and hold none.

A request leaves by `finish` or `leave` alone, and whoever calls one of them makes its one terminal output. Imports
neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_engine.core.block_pool import BlockPoolError
from paceline_engine.core.deadlines import DeadlineQueue
from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.ranked import RankedRequests, SchedulingPolicy
from paceline_engine.core.request import Request, RequestStatus
from paceline_engine.messages import ErrorKind, RequestOutput


class LiveRequests:
    """The queues, and the books of who came and went. released: whose rows the device can drop with the next plan."""

    def __init__(self, policy: SchedulingPolicy, kv: KVManager) -> None:
        self.by_id: dict[str, Request] = {}
        self.running = RankedRequests(policy)
        self.waiting = RankedRequests(policy)
        self.deadlines = DeadlineQueue()
        self.released: list[str] = []
        self._kv = kv

    def add(self, request: Request) -> None:
        """A request arrived, or comes back from a recorded state."""
        self.by_id[request.request_id] = request
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).add(request)
        self.deadlines.add(request)

    def restore(self, requests: Iterable[Request], released: Iterable[str]) -> None:
        """Go on from a recorded state."""
        for request in requests:
            self.add(request)
        self.released = list(released)

    def preempt(self, request: Request) -> None:
        """The running request that was just taken out of its queue gives up its blocks and waits again."""
        self._kv.preempt(request)
        request.status = RequestStatus.PREEMPTED
        request.draft_token_ids = ()
        request.num_preemptions += 1
        self.waiting.add(request)
        self.released.append(request.request_id)

    def finish(
        self, request: Request, reason: str, error: str | None = None, error_kind: ErrorKind | None = None
    ) -> RequestOutput:
        """End a request; its terminal output, without tokens."""
        self.leave(request)
        return RequestOutput(
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            error_kind=error_kind,
            num_cached_tokens=request.num_cached_tokens,
            loaded_tokens=request.loaded_tokens,
        )

    def leave(self, request: Request) -> None:
        """The only way out: whoever calls this makes the request's one terminal output."""
        del self.by_id[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.released.append(request.request_id)
        else:
            self.waiting.remove(request)
        self._kv.finish(request)
        request.status = RequestStatus.FINISHED

    def take_released(self) -> tuple[str, ...]:
        """Whose rows can go, since the last call."""
        released, self.released = tuple(self.released), []
        return released

    def check_integrity(self, max_num_seqs: int, max_preemptions: int) -> None:
        """Raise unless every live request is in exactly one queue and the block books balance."""
        queued = [*self.running, *self.waiting]
        if len(queued) != len(self.by_id) or {r.request_id for r in queued} != set(self.by_id):
            raise BlockPoolError(f"{len(self.by_id)} live requests, {len(queued)} in the queues")
        if any(request.status is not RequestStatus.RUNNING for request in self.running):
            raise BlockPoolError("a request in the running list isn't running")
        if len(self.running) > max_num_seqs:
            raise BlockPoolError(f"{len(self.running)} running requests, at most {max_num_seqs} allowed")
        if any(request.num_preemptions > max_preemptions for request in queued):
            raise BlockPoolError(f"a request was preempted more than {max_preemptions} times")
        self._kv.check_integrity(queued)
