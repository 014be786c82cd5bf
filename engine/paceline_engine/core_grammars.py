"""Which compiled grammars the core holds: each is sent once, under an id of its own, and dropped when we say so.

A compiled grammar has up to megabytes, and loading one takes the core up to seconds, beside its steps: so it is sent
before its first request, which waits here until the core has loaded it, and requests then only name it. This process
owns the bound. What a live request uses is never dropped; what was dropped before its request was sent goes again,
right before it. Ids are never used twice. One event loop; imports neither torch nor FastAPI.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from paceline_engine.messages import CommandResult, DropGrammar, LoadGrammar, PrepareGrammars, ToCore

MAX_GRAMMARS = 256
# In the core's memory, whose size of a grammar the core says.
MAX_GRAMMAR_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A compiled grammar. key: digest of kind, source and tokenizer; grammar: xgrammar's serialised form."""

    key: str
    grammar: bytes


class GrammarRefused(RuntimeError):
    """The core can't load a grammar: one line that says why."""


@dataclass(slots=True)
class _Entry:
    """A grammar that the core was sent. users: live requests that name it. num_bytes: as sent until it is loaded."""

    grammar_id: int
    loaded: asyncio.Future[CommandResult]
    num_bytes: int
    users: int = 0


class CoreGrammars:
    """The core's grammars, least recently used dropped first.

    send: puts a message on the core's queue. ask: does so at once with a message that has an id for its result.
    """

    def __init__(
        self,
        send: Callable[[ToCore], None],
        ask: Callable[[Callable[[str], ToCore]], asyncio.Future[CommandResult]],
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_bytes: int = MAX_GRAMMAR_BYTES,
    ) -> None:
        self._send = send
        self._ask = ask
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._key_of: dict[int, str] = {}
        self._ids = itertools.count()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, vocabulary: bytes = b"") -> None:
        """Have the core get ready for grammars, with the vocabulary once there is one, before the first one comes."""
        self._send(PrepareGrammars(vocabulary=vocabulary))

    async def ready(self, constraint: Constraint) -> None:
        """Return when the core has loaded it. Raises GrammarRefused."""
        # A client that goes away must not end what others wait for.
        result = await asyncio.shield(self._find(constraint).loaded)
        if result.error is not None:
            raise GrammarRefused(result.error)

    def hold(self, constraint: Constraint) -> int:
        """The id by which a request names it, until `release`."""
        entry = self._find(constraint)
        entry.users += 1
        return entry.grammar_id

    def release(self, grammar_id: int) -> None:
        """A request that held it has ended in the core."""
        entry = self._entries.get(self._key_of.get(grammar_id, ""))
        if entry is not None:
            entry.users -= 1
            self._trim()

    def _find(self, constraint: Constraint) -> _Entry:
        entry = self._entries.get(constraint.key)
        if entry is None:
            grammar_id = next(self._ids)
            loaded = self._ask(
                lambda command_id: LoadGrammar(command_id=command_id, grammar_id=grammar_id, grammar=constraint.grammar)
            )
            entry = _Entry(grammar_id, loaded, len(constraint.grammar))
            self._entries[constraint.key] = entry
            self._key_of[entry.grammar_id] = constraint.key
            self._num_bytes += entry.num_bytes
            entry.loaded.add_done_callback(lambda done: self._set_loaded(constraint.key, entry, done))
        self._entries.move_to_end(constraint.key)
        return entry

    def _set_loaded(self, key: str, entry: _Entry, done: asyncio.Future[CommandResult]) -> None:
        if self._entries.get(key) is not entry:
            return
        if done.cancelled() or done.result().error is not None:
            self._drop(key)
            return
        num_bytes = int(done.result().values["bytes"])
        self._num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes
        self._trim()

    def _trim(self) -> None:
        """Drop what nobody uses until the bounds hold; the newest stays, for somebody waits for it."""
        if len(self._entries) <= self._max_grammars and self._num_bytes <= self._max_bytes:
            return
        idle = [key for key, entry in list(self._entries.items())[:-1] if entry.users == 0 and entry.loaded.done()]
        for key in idle:
            if len(self._entries) <= self._max_grammars and self._num_bytes <= self._max_bytes:
                return
            self._drop(key)

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key)
        del self._key_of[entry.grammar_id]
        self._num_bytes -= entry.num_bytes
        self._send(DropGrammar(grammar_id=entry.grammar_id))
