"""Incremental detokenisation and stop strings: token ids in, text that will never be taken back out.

Streamed text is exactly the text of a non-streamed answer: no half characters (a multi-byte character waits for its
last byte), no part of a stop string (a tail that could begin one waits until it can't). Pure: no I/O, no clock.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from paceline_engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A window tokenizer's held-back text: after this many tokens an invalid sequence is certain and is let go.
MAX_HELD_TOKENS = 8


class Detokenizer(Protocol):
    """Turns one request's output ids into text."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        ...

    def flush(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level BPE: a token is bytes, so an incremental UTF-8 decoder is exact and costs O(1) a token."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; hidden tokens have none."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.piece(token_id))

    def flush(self) -> str:
        """What was held back."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decode a short window with and without the new tokens, emit the difference."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; hidden tokens have none."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        text = self._difference()
        if not text or (text.endswith(REPLACEMENT) and len(self._pending) < MAX_HELD_TOKENS):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """What was held back."""
        text = self._difference()
        self._pending = []
        return text

    def _difference(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]


def make_detokenizer(tokenizer: Tokenizer, hidden: frozenset[int] | None = None) -> Detokenizer:
    """A detokenizer for one request; by default special tokens are hidden."""
    hidden = tokenizer.special_ids if hidden is None else hidden
    return ByteDetokenizer(tokenizer, hidden) if tokenizer.is_byte_level else WindowDetokenizer(tokenizer, hidden)


class StopFinder:
    """Finds the earliest stop string over a stream of text pieces. keep: the text goes on to the string's end."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be sent, whether a stop string was found). After a find, nothing more may be pushed."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at, len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            at, size = min(found)
            return text[: at + size if self._keep else at], True
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The tail that looked like a stop string's beginning and was not."""
        text, self._held = self._held, ""
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for size in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class OutputText:
    """One request's output: ids in, text out, until a stop string or the end.

    min_tokens: text of the first tokens is not searched for stop strings. keep_stop: a stop string that was found is
    part of the text. hidden: ids without text; None hides the special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        keep_stop: bool = False,
        hidden: frozenset[int] | None = None,
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer, hidden)
        self._finder = StopFinder(stops, keep=keep_stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped = False

    def push(self, token_id: int, *, silent: bool = False) -> str:
        """Text to send for one more token; `silent` counts a token without text (the one that ended the output)."""
        self.num_tokens += 1
        if silent:
            return ""
        text = self._detokenizer.push(token_id)
        if self.num_tokens < self._min_tokens:
            return text
        text, self.stopped = self._finder.push(text)
        return text

    def flush(self) -> str:
        """The rest of the text once the request has ended; nothing after a stop string."""
        if self.stopped:
            return ""
        text, self.stopped = self._finder.push(self._detokenizer.flush())
        return text if self.stopped else text + self._finder.flush()
