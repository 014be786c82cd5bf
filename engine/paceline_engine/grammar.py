"""Constrained decoding on the device: compiled grammars, a request's place in its own, masks of what may follow.

xgrammar (Dong et al., arXiv 2411.15100) matches; grammars arrive compiled. They, the vocabulary and the package itself
are loaded in a thread of their own, so that no step waits for them; with the first constraint, so that an engine
without constraints never imports it. Who sends them owns the bound (`core_grammars`). The core process only.

A request may end only where its grammar may: at the model's end-of-sequence tokens and the request's own stop tokens
alike. Time spent on masks and on state is counted apart. All requests wait for each one's grammar, and the work of an
ambiguous one may double with every token: a grammar over its time is not followed any further.
"""

from __future__ import annotations

import sys
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline_engine.sampling.noise import Float32Array
from paceline_engine.sampling.row import MaskWords, RowError

if TYPE_CHECKING:
    import xgrammar

# Of this thread's time: what a request's grammar may take, and how much more with each token. Found out after a call,
# but the work of one call is at most a few times that of the call before.
MAX_SECONDS = 0.5
MAX_SECONDS_PER_TOKEN = 0.01
# Where text is forced, what may come next are beginnings of one string.
MAX_BEGINNINGS = 64
# An expanded mask has a byte for each token of the vocabulary.
MAX_MASK_BYTES = 16 * 1024 * 1024

BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class GrammarStats:
    """Totals since start. Seconds; masks_shared were found ready-made, masks_built were not.

    waited: grammars that a step had to wait for, since their request came before they were loaded.
    """

    mask_build_seconds: float = 0.0
    state_update_seconds: float = 0.0
    load_seconds: float = 0.0
    masks_built: int = 0
    masks_shared: int = 0
    loaded: int = 0
    waited: int = 0


def import_xgrammar() -> Any:
    """The xgrammar package, without the seconds and megabytes of transformers.

    It imports transformers for type checks on tokenizers that this engine doesn't use; an empty module stands in for it
    while xgrammar is imported, unless the real one is there already.
    """
    if "xgrammar" in sys.modules or "transformers" in sys.modules:
        import xgrammar

        return xgrammar
    sys.modules["transformers"] = _StandIn("transformers")
    try:
        import xgrammar
    finally:
        del sys.modules["transformers"]
    return xgrammar


class _StandIn(types.ModuleType):
    """A module that has every class, all of them empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Grammars:
    """Loaded grammars by id, and ready masks, least recently used forgotten first. Requests hold on to their own."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.stats = GrammarStats()
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_masks = max(1, MAX_MASK_BYTES // vocab_size)
        self._loader: ThreadPoolExecutor | None = None
        self._vocabulary: xgrammar.TokenizerInfo | None = None
        self._pieces: list[bytes] = []
        self._grammars: dict[int, Future[xgrammar.CompiledGrammar]] = {}
        self._masks: OrderedDict[bytes, BoolArray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grammars)

    def prepare(self, vocabulary: bytes) -> None:
        """Import the package, and load a serialised vocabulary if there is one, beside the steps."""
        self._in_background().submit(self._prepare, vocabulary)

    def load(self, grammar_id: int, grammar: bytes, done: Callable[[int, str | None], None]) -> None:
        """Load a serialised grammar, beside the steps; then call `done` there: its bytes, or why it can't be used."""

        def tell(loaded: Future[xgrammar.CompiledGrammar]) -> None:
            error = loaded.exception()
            done(loaded.result().memory_size_bytes if error is None else 0, None if error is None else str(error))

        future = self._grammars[grammar_id] = self._in_background().submit(self._load, grammar)
        future.add_done_callback(tell)

    def drop(self, grammar_id: int) -> None:
        """Forget a grammar; requests that hold it go on."""
        self._grammars.pop(grammar_id, None)

    def _in_background(self) -> ThreadPoolExecutor:
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return self._loader

    def _prepare(self, vocabulary: bytes) -> None:
        begin = time.perf_counter()
        package = import_xgrammar()
        if vocabulary and self._vocabulary is None:
            loaded = package.TokenizerInfo.deserialize_json(vocabulary.decode())
            self._pieces, self._vocabulary = loaded.decoded_vocab, loaded
        self.stats.load_seconds += time.perf_counter() - begin

    def _load(self, grammar: bytes) -> xgrammar.CompiledGrammar:
        """Raises RowError if the grammar can't be used."""
        begin = time.perf_counter()
        try:
            if self._vocabulary is None:
                raise RowError("the vocabulary didn't come before it")
            return import_xgrammar().CompiledGrammar.deserialize_json(grammar.decode("utf-8"), self._vocabulary)
        except Exception as error:
            # xgrammar raises its own types and bare RuntimeErrors alike; whatever it is, it is about this one grammar.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RowError(f"the request's compiled grammar can't be loaded: {reason}") from error
        finally:
            self.stats.loaded += 1
            self.stats.load_seconds += time.perf_counter() - begin

    def matcher(self, grammar_id: int, stop_token_ids: Iterable[int], output: Sequence[int]) -> GrammarState:
        """A request's place after `output`. Raises RowError if the grammar can't be used or forbids the output."""
        loaded = self._grammars.get(grammar_id)
        if loaded is None:
            raise RowError("the request's grammar was not sent before it")
        self.stats.waited += not loaded.done()
        compiled = loaded.result()
        stops = [i for i in {*self._eos_token_ids, *stop_token_ids} if 0 <= i < self.vocab_size]
        state = GrammarState(self, import_xgrammar().GrammarMatcher(compiled), sorted(stops))
        for token_id in output:
            if not state.push(token_id):
                raise RowError("the output so far doesn't follow the request's grammar")
        return state

    def longest(self, token_ids: Sequence[int]) -> int | None:
        """The token that all the others are beginnings of; None if there is none."""
        pieces = {token_id: self._pieces[token_id] for token_id in token_ids}
        longest = max(token_ids, key=lambda token_id: len(pieces[token_id]))
        return longest if all(pieces[longest].startswith(piece) for piece in pieces.values()) else None

    def blocked(self, mask: npt.NDArray[np.int32]) -> BoolArray:
        """[vocab] which tokens a bit mask leaves out. States with equal masks share one, across requests and steps."""
        key = mask.tobytes()
        known = self._masks.get(key)
        if known is not None:
            self._masks.move_to_end(key)
            self.stats.masks_shared += 1
            return known
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
        blocked: BoolArray = bits == 0
        self.stats.masks_built += 1
        self._masks[key] = blocked
        if len(self._masks) > self._max_masks:
            self._masks.popitem(last=False)
        return blocked


class GrammarState:
    """One request's place in its grammar. Behind an ending token nothing but ending tokens is allowed."""

    def __init__(self, grammars: Grammars, matcher: xgrammar.GrammarMatcher, stop_token_ids: list[int]) -> None:
        self._grammars = grammars
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self.error: RowError | None = None
        self._seconds_left = MAX_SECONDS
        self._num_after_end = 0
        self._is_filled = False
        self._mask: npt.NDArray[np.int32] = np.zeros((1, -(-grammars.vocab_size // 32)), dtype=np.int32)
        self._stop_bits = np.zeros_like(self._mask)
        for token_id in stop_token_ids:
            self._stop_bits.view(np.uint32)[0, token_id // 32] |= np.uint32(1 << token_id % 32)

    def push(self, token_id: int) -> bool:
        """Move over a token; False, and no move, if it isn't allowed."""
        begin, spent = time.perf_counter(), time.thread_time()
        moved = self.error is None and self._push(token_id)
        self._spend(spent, MAX_SECONDS_PER_TOKEN)
        self._grammars.stats.state_update_seconds += time.perf_counter() - begin
        return moved

    def _spend(self, begin: float, earned: float = 0.0) -> None:
        self._seconds_left += earned - (time.thread_time() - begin)
        if self._seconds_left < 0:
            self.error = RowError("the request's grammar takes too long to follow: make it simpler", "invalid")

    def _push(self, token_id: int) -> bool:
        self._is_filled = False
        if token_id in self._stop_token_ids:
            # Where the grammar may end these end it, though one of them may be a word of the grammar too.
            allowed = self._num_after_end > 0 or self._matcher.is_completed()
            self._num_after_end += allowed
            return allowed
        return self._num_after_end == 0 and self._matcher.accept_token(token_id)

    def pop(self, count: int) -> None:
        """Undo the latest `count` successful pushes."""
        begin = time.perf_counter()
        self._pop(count)
        self._grammars.stats.state_update_seconds += time.perf_counter() - begin

    def _pop(self, count: int) -> None:
        self._is_filled = self._is_filled and count == 0
        after_end = min(count, self._num_after_end)
        self._num_after_end -= after_end
        if count > after_end:
            self._matcher.rollback(count - after_end)

    def mask(self) -> MaskWords | None:
        """[ceil(vocab / 32)] which tokens may come next, a bit each; None if the grammar isn't followed any more.

        Good until the next call.
        """
        if self.error is not None:
            return None
        begin, spent = time.perf_counter(), time.thread_time()
        words = self._fill()[0]
        self._spend(spent)
        self._grammars.stats.mask_build_seconds += time.perf_counter() - begin
        return words

    def restrict(self, values: Float32Array) -> None:
        """Set logits [vocab] of tokens that may not come next to -inf."""
        words = self.mask()
        if words is None:
            return
        begin = time.perf_counter()
        np.copyto(values, -np.inf, where=self._grammars.blocked(words))
        self._grammars.stats.mask_build_seconds += time.perf_counter() - begin

    def _fill(self) -> npt.NDArray[np.int32]:
        mask = self._mask
        if self._is_filled:
            return mask
        self._is_filled = True
        if self._num_after_end > 0:
            mask[:] = self._stop_bits
            return mask
        self._matcher.fill_next_token_bitmask(mask)
        if self._matcher.is_completed():
            mask |= self._stop_bits
        else:
            mask &= ~self._stop_bits
        return mask

    def forced_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens that spell what must come next; the model may spell it in other tokens.

        Where the grammar then must end, an ending token is the last of them. Not xgrammar's jump-forward string, which
        has no bound: `root ::= "a" root` forces text without end.
        """
        begin, spent = time.perf_counter(), time.thread_time()
        forced: list[int] = []
        while self.error is None and len(forced) < limit and self._num_after_end == 0:
            token_id = self._forced_token()
            if token_id is None or not self._push(token_id):
                break
            forced.append(token_id)
        self._pop(len(forced))
        self._spend(spent)
        self._grammars.stats.state_update_seconds += time.perf_counter() - begin
        return forced

    def _forced_token(self) -> int | None:
        """The longest token that must come next, as far as the allowed ones tell."""
        mask = self._fill()[0]
        words = np.flatnonzero(mask)
        if not 0 < len(words) <= MAX_BEGINNINGS:
            return None
        bits = np.unpackbits(mask[words].view(np.uint8).reshape(len(words), -1), axis=1, bitorder="little")
        rows, columns = np.nonzero(bits)
        allowed: list[int] = (words[rows] * 32 + columns).tolist()
        if len(allowed) > MAX_BEGINNINGS:
            return None
        ending = set(self._stop_token_ids).intersection(allowed)
        if ending:
            return self._stop_token_ids[0] if len(ending) == len(allowed) else None
        return self._grammars.longest(allowed)
