"""The rules of one request but for penalties, as what they do to the logits of a position: biases, bans and a mask.

Made once, when the request begins to run. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_engine.sampling.noise import Float32Array
from paceline_engine.sampling.row import MaskWords, Row


@dataclass(frozen=True, slots=True)
class Biases:
    """ids ascending, each once; -inf among the values bans, whatever the logit."""

    ids: npt.NDArray[np.int32]
    values: Float32Array

    @classmethod
    def of(cls, biases: Iterable[tuple[int, float]], bans: Iterable[int]) -> Biases:
        """A ban wins over a bias."""
        merged = dict(biases) | dict.fromkeys(bans, -np.inf)
        ids = sorted(merged)
        return cls(np.array(ids, dtype=np.int32), np.array([merged[i] for i in ids], dtype=np.float32))


@dataclass(frozen=True, slots=True)
class PositionRules:
    """Of one position. mask: bit i of word w allows token 32 w + i; None allows all."""

    biases: Biases
    mask: MaskWords | None


_NONE = PositionRules(Biases.of((), ()), None)


class RequestRules:
    """Of one request. needs_tokens: they follow from output tokens, not only from how many there are.

    are_empty: nothing happens at any position behind held_until output tokens.
    """

    def __init__(self, row: Row, vocab_size: int) -> None:
        self._row = row
        banned, held = row.banned_ids.tolist(), row.held_ids.tolist()
        allowed = None if row.allowed_ids is None else _packed(row.allowed_ids, vocab_size)
        self._free = PositionRules(Biases.of(row.sampling.logit_bias, banned), allowed)
        self._held = PositionRules(Biases.of(row.sampling.logit_bias, banned + held), allowed)
        self.held_until = row.sampling.min_tokens if held else 0
        self.needs_tokens = row.matcher is not None or bool(row.bad_sequences)
        self.are_empty = not self.needs_tokens and allowed is None and len(self._free.biases.ids) == 0

    def verified(self, num_output: int, guesses: Sequence[int]) -> list[PositionRules]:
        """Of the position behind `num_output` output tokens, and behind each of the guesses.

        Where tokens are needed the row must stand behind that many. Positions behind a guess that the grammar refuses
        have no rules: the guess itself is masked, so none of them is used.
        """
        if not self.needs_tokens:
            return [self._at(num_output + index) for index in range(len(guesses) + 1)]
        found = [self._at(num_output)]
        for guess in guesses:
            if not self._row.push(guess):
                break
            found.append(self._at(num_output + len(found)))
        self._row.pop(len(found) - 1)
        return found + [_NONE] * (len(guesses) + 1 - len(found))

    def _at(self, num_output: int) -> PositionRules:
        """Where tokens are needed, the row stands behind `num_output` of them."""
        rules = self._held if num_output < self.held_until else self._free
        if not self.needs_tokens:
            return rules
        biases, mask = rules.biases, rules.mask
        bans = self._row.sequence_bans()
        if bans:
            biases = Biases.of(zip(biases.ids.tolist(), biases.values.tolist(), strict=True), bans)
        words = None if self._row.matcher is None else self._row.matcher.mask()
        if words is not None:
            mask = words.copy() if mask is None else words & mask
        return PositionRules(biases, mask)


def _packed(token_ids: npt.NDArray[np.int64], vocab_size: int) -> MaskWords:
    """[ceil(vocab_size / 32)] words whose bits are the tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
