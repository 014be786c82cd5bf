"""Hand-offs as the core's loop sees them: answers wait until their KV is lent, and leases end with their requests.

All methods run in the loop's thread, and none waits. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline_engine.core.handoffs import HandedOff, HandoffBook
from paceline_engine.kv_borrower import KVBorrower
from paceline_engine.kv_lender import KVLender, ReadsChunks
from paceline_engine.messages import AddRequest, RequestOutput
from paceline_engine.records import replace
from paceline_kvstore.tiered.shared import shared_level
from paceline_kvstore.tiered.store import TieredStore

LEASE_SECONDS = 60.0


class Handoffs:
    """Both sides of one engine. lender: None where nothing can be lent."""

    def __init__(self, lender: KVLender | None, borrower: KVBorrower, book: HandoffBook) -> None:
        self._lender = lender
        self._borrower = borrower
        self._book = book
        # Answers whose chunks are on their way.
        self._held: dict[str, RequestOutput] = {}

    @property
    def lender(self) -> KVLender | None:
        """What lends, for the scheduler."""
        return self._lender

    @property
    def borrower(self) -> KVBorrower:
        """What knows which requests may be looked up."""
        return self._borrower

    @property
    def lends(self) -> bool:
        """Whether there is a tier that other engines reach."""
        return self._lender is not None

    @property
    def counts(self) -> dict[str, int]:
        """Hand-offs by "side outcome"."""
        return self._book.counts

    @property
    def leases(self) -> dict[str, int]:
        """Open leases by side."""
        lent = self._lender.num_leases if self._lender is not None else 0
        return {"prefill": lent, "decode": self._borrower.num_leases}

    @property
    def recent(self) -> list[HandedOff]:
        """The latest ones, oldest first."""
        return self._book.recent

    def on_news(self, tell: Callable[[], object]) -> None:
        """Have `tell` called, in any thread, when there is something to do."""
        self._borrower.on_news(tell)
        if self._lender is not None:
            self._lender.on_news(tell)

    def arrived(self, message: AddRequest) -> None:
        """A request came; before the scheduler hears of it."""
        if message.handoff is not None:
            self._borrower.expect(message.request_id, message.handoff)

    def aborted(self, request_id: str) -> RequestOutput | None:
        """The terminal output of a request whose answer was waiting for its hand-off; None if it was not."""
        held = self._held.pop(request_id, None)
        if held is None or self._lender is None:
            return None
        self._lender.abort(request_id)
        return replace(held, finish_reason="abort")

    def settled(self, outputs: Sequence[RequestOutput], *, is_last: bool) -> list[RequestOutput]:
        """What of a step's outputs can be sent, and answers that have waited; with is_last all, whatever they lack."""
        ready: list[RequestOutput] = []
        for output in outputs:
            if output.finish_reason is not None:
                self._borrower.release(output.request_id)
                if self._lender is not None and self._lender.is_lending(output.request_id):
                    self._held[output.request_id] = output
                    continue
            ready.append(output)
        for request_id, handoff in self._lender.poll() if self._held and self._lender is not None else ():
            held = self._held.pop(request_id, None)
            if held is not None:
                ready.append(replace(held, handoff=handoff))
        if is_last:
            ready += self._held.values()
            self._held.clear()
        return ready

    def reset(self) -> None:
        """What was lent until now must not be used any more."""
        if self._lender is not None:
            self._lender.new_epoch()

    def close(self) -> None:
        """End the threads."""
        if self._lender is not None:
            self._lender.close()
        self._borrower.close()


def open_handoffs(
    store: TieredStore | None = None,
    copier: ReadsChunks | None = None,
    namespace: bytes = b"",
    chunk_tokens: int = 0,
    lease_s: float = LEASE_SECONDS,
) -> Handoffs:
    """Through the first tier of the store that other engines reach; without one nothing is lent, nor borrowed."""
    shared, book = None if store is None else shared_level(store), HandoffBook()
    lender = None
    if shared is not None and copier is not None:
        lender = KVLender(shared, copier, namespace, chunk_tokens, lease_s, book)
    return Handoffs(lender, KVBorrower(shared, namespace, lease_s, book), book)
