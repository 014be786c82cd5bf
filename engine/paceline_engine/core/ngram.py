"""Guesses from a request's own text: what followed the last tokens when they came before (prompt look-up).

Copy-heavy work repeats its prompt, and this finds where. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

# Occurrences of an n-gram that a proposal looks at; text that repeats one pair of tokens would cost a scan otherwise.
MAX_CANDIDATES = 64


def propose_ngram(token_ids: Sequence[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """What followed the earliest occurrence of the longest suffix of min_n to max_n tokens; [] if it is new.

    Prefix function (Knuth, Morris, Pratt) over the reversed text, as in vLLM: O(len(token_ids)). `NgramIndex` gives the
    same without reading the text again; this is its definition.
    """
    text = token_ids[::-1]
    prefix = [0] * len(text)
    best, position, length = 0, 0, 0
    for index in range(1, len(text)):
        while length and (length == max_n or text[index] != text[length]):
            length = prefix[length - 1]
        if text[index] == text[length] and length < max_n:
            length += 1
        prefix[index] = length
        # Later in the reversed text is earlier in the text.
        if length >= max(best, min_n):
            best, position = length, index
    if best < min_n:
        return []
    begin = len(token_ids) - 1 - position + best
    return list(token_ids[begin : begin + num_tokens])


class NgramIndex:
    """Where each n-gram of a growing text ends, so that a proposal costs the same however long the text is."""

    __slots__ = ("_ends", "_num_indexed", "max_n", "min_n")

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Up to `num_tokens` guesses for what follows `token_ids`, which only ever grows between calls."""
        self._extend(token_ids)
        best, best_end = 0, 0
        for end in self._ends.get(tuple(token_ids[-self.min_n :]), ()):
            length = self.min_n
            while length < min(self.max_n, end) and token_ids[end - length - 1] == token_ids[-length - 1]:
                length += 1
            if length > best:
                best, best_end = length, end
                if length == self.max_n:
                    break
        return token_ids[best_end : best_end + num_tokens] if best else []

    def _extend(self, token_ids: list[int]) -> None:
        """Index n-grams that end before the last token: the last one's own would only find itself."""
        size = self.min_n
        for end in range(max(size, self._num_indexed + 1), len(token_ids)):
            ends = self._ends.setdefault(tuple(token_ids[end - size : end]), [])
            if len(ends) < MAX_CANDIDATES:
                ends.append(end)
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
