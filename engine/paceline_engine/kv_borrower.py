"""The decode side of a hand-off: leases of other engines are taken over, and ended when their chunks are here.

A lease is asked for when its request arrives, in a thread; until the answer is known the request isn't looked up in the
store. One that isn't honoured isn't looked up at all: its prompt is computed. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline_engine.core.handoffs import HandoffBook, why_refused
from paceline_engine.core.stored_kv import Arrived, ChunkLoad, StoredKV, Wanted
from paceline_engine.kv_lender import holder_of
from paceline_engine.messages import Handoff
from paceline_kvstore.tiered.shared import SharedLevel

NUM_THREADS = 2

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Loan:
    """A lease and whether it may be used; None: not known yet. is_over: nobody wants it any more."""

    holder: str
    num_chunks: int
    is_good: bool | None = None
    is_over: bool = False


class KVBorrower:
    """`close` it: it has threads. At most one loan a live request. shared: None refuses all hand-offs."""

    def __init__(
        self,
        shared: SharedLevel | None,
        namespace: bytes,
        lease_s: float,
        book: HandoffBook,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._shared = shared
        self._namespace = namespace.hex()
        self._lease_s = lease_s
        self._book = book
        self._tell: Callable[[], object] = lambda: None
        self._wall_clock = wall_clock
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-borrow")
        self._lock = threading.Lock()
        self._loans: dict[str, _Loan] = {}

    @property
    def num_leases(self) -> int:
        """Leases that were taken over, or are asked for, and not ended."""
        with self._lock:
            return sum(loan.is_good is not False for loan in self._loans.values())

    def on_news(self, tell: Callable[[], object]) -> None:
        """Have `tell` called, in any thread, when a verdict is known."""
        self._tell = tell

    def expect(self, request_id: str, handoff: Handoff) -> None:
        """A request with a hand-off came: find out whether to honour it."""
        loan = _Loan(holder_of(handoff.epoch, handoff.transfer_id), handoff.num_chunks)
        with self._lock:
            self._loans[request_id] = loan
        now = self._wall_clock()
        reason = "no_store" if self._shared is None else why_refused(handoff, self._namespace, now)
        if reason is None:
            self._pool.submit(self._take_over, request_id, loan)
            return
        loan.is_good = False
        self._book.note(request_id, "decode", reason, now)

    def verdict(self, request_id: str) -> bool | None:
        """Whether the store may be asked for this request's KV; None: ask again. True without a hand-off."""
        with self._lock:
            loan = self._loans.get(request_id)
            return True if loan is None else loan.is_good

    def release(self, request_id: str) -> None:
        """The chunks are here, or of no use: the request has ended, or is through with the store."""
        with self._lock:
            loan = self._loans.pop(request_id, None)
            if loan is None:
                return
            loan.is_over = True
            is_held = loan.is_good is True
        if is_held:
            self._pool.submit(self._end, loan)

    def close(self) -> None:
        """End what was taken over."""
        for request_id in list(self._loans):
            self.release(request_id)
        self._pool.shutdown()

    def _take_over(self, request_id: str, loan: _Loan) -> None:
        """In a thread. The lender's lease becomes ours: from now on it lasts as long as ours would."""
        assert self._shared is not None
        is_good = False
        try:
            is_good = self._shared.extend(loan.holder, self._lease_s)
        except Exception:
            logger.exception("a lease can't be asked for; the prompt is computed")
        with self._lock:
            loan.is_good = is_good
            is_over = loan.is_over
        self._book.note(request_id, "decode", "honoured" if is_good else "lease", self._wall_clock(), loan.num_chunks)
        if is_over and is_good:
            self._end(loan)
        self._tell()

    def _end(self, loan: _Loan) -> None:
        assert self._shared is not None
        try:
            self._shared.release(loan.holder)
        except Exception:
            logger.exception("a lease can't be ended; it expires")


class BorrowedPrefixes:
    """Implements `StoredKV`: a store that isn't asked about a request before its hand-off's verdict is known."""

    def __init__(self, store: StoredKV, borrower: KVBorrower) -> None:
        self._store = store
        self._borrower = borrower

    def find(self, wanted: Wanted) -> int | None:
        """As the store; nothing for a request whose hand-off isn't honoured, or isn't in the time that it has."""
        verdict = self._borrower.verdict(wanted.request_id)
        if verdict is None and wanted.may_wait:
            return None
        found = self._store.find(wanted) if verdict else wanted.first
        if found is not None and found <= wanted.first:
            self._borrower.release(wanted.request_id)
        return found

    def begin(self, load: ChunkLoad) -> None:
        """As the store."""
        self._store.begin(load)

    def poll(self) -> Sequence[Arrived]:
        """As the store."""
        news = self._store.poll()
        for arrived in news:
            if arrived.is_over:
                self._borrower.release(arrived.request_id)
        return news

    def cancel(self, request_id: str) -> None:
        """As the store."""
        self._store.cancel(request_id)
        self._borrower.release(request_id)

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        """As the store."""
        return self._store.offer(key, parent, block_ids, tenant)

    def forget(self, keys: Sequence[bytes]) -> None:
        """As the store."""
        self._store.forget(keys)

    def clear(self) -> None:
        """As the store."""
        self._store.clear()
