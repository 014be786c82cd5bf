"""What the device keeps of a running request: its tokens and the state of every rule on its logits.

Normalised once, when the request begins to run (anew after a preemption), never per step. All rules are functions of
the row's state; `push` and `pop` move that state over guesses and back, so each verified position gets its own rules.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline_engine.core.outputs import AdmittedRequest
from paceline_engine.messages import ErrorKind
from paceline_engine.sampling.cuts import has_cuts
from paceline_engine.sampling.noise import Float32Array, IntArray
from paceline_engine.sampling.penalties import TokenCounts, has_penalties
from paceline_engine.sampling.speculation import Drafts

MaskWords = npt.NDArray[np.int32]

# Below this the softmax is a one-hot within float32, and logits / T may overflow.
MIN_TEMPERATURE = 1e-5


class RowError(ValueError):
    """A request can't run on this model; the message is for its client, `kind` says whose fault it is."""

    def __init__(self, message: str, kind: ErrorKind = "internal") -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


class Matcher(Protocol):
    """A grammar's state after the row's output. error: why it can't be followed any further; it then refuses tokens."""

    error: RowError | None

    def push(self, token_id: int) -> bool:
        """Move over a token; False, and no move, if the grammar doesn't allow it."""
        ...

    def pop(self, count: int) -> None:
        """Undo the latest `count` successful pushes."""
        ...

    def mask(self) -> MaskWords | None:
        """Which tokens may come next: bit i of word w is token 32 w + i. None, with `error` set: nothing is known.

        Good until the next call of any method.
        """
        ...

    def restrict(self, values: Float32Array) -> None:
        """Set logits [vocab] of tokens that `mask` leaves out to -inf."""
        ...

    def forced_tokens(self, limit: int) -> list[int]:
        """Up to `limit` tokens that spell what must come next, whatever the model says; often none."""
        ...


class Row:
    """One running request. refusal: why it can't be sampled; it fails alone, when its next token is due.

    Rules' token ids are arrays of those that the model has: allowed_ids (None allows all), banned_ids (bad words of one
    token; longer ones are bad_sequences), held_ids (not before min_tokens), bias_ids with their biases.
    """

    def __init__(
        self, request: AdmittedRequest, vocab_size: int, eos_token_ids: Iterable[int], matcher: Matcher | None = None
    ) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.adapter = request.adapter
        self.sampling = sampling
        self.num_prompt_tokens = request.num_prompt_tokens
        self.token_ids = list(request.token_ids)
        self.had_output = len(self.token_ids) > self.num_prompt_tokens
        self.refusal: RowError | None = None
        self.greedy = sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1
        self.has_cuts = has_cuts(sampling)
        self.matcher = matcher
        self.has_penalties = has_penalties(sampling)
        self._counts: TokenCounts | None = None
        ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
        self.ending_ids = frozenset(ending)
        self.drafts: Drafts | None = None
        self.held_ids = _ids(ending, vocab_size)
        self.allowed_ids = _ids(sampling.allowed_token_ids, vocab_size) if sampling.allowed_token_ids else None
        self.bias_ids = _checked((token_id for token_id, _ in sampling.logit_bias), vocab_size, "logit_bias")
        self.biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self.banned_ids = _ids((words[0] for words in sampling.bad_words if len(words) == 1), vocab_size)
        self.bad_sequences = tuple(
            words for words in sampling.bad_words if len(words) > 1 and len(_ids(words, vocab_size)) == len(set(words))
        )
        if self.allowed_ids is not None and len(self.allowed_ids) == 0:
            raise RowError(f"allowed_token_ids are all beyond the model's vocabulary of {vocab_size}")
        self.has_rules = bool(
            matcher is not None
            or self.has_penalties
            or self.allowed_ids is not None
            or sampling.logit_bias
            or sampling.bad_words
            or sampling.min_tokens > 0
        )

    @property
    def error(self) -> RowError | None:
        """Why no further token can be sampled."""
        return self.refusal or (None if self.matcher is None else self.matcher.error)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, pushed guesses included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_ended(self) -> bool:
        """Whether the latest output token ends the output."""
        return self.num_output_tokens > 0 and self.token_ids[-1] in self.ending_ids

    def _make_counts(self) -> TokenCounts:
        prompt, output = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
        # Only the repetition penalty looks at the prompt.
        return TokenCounts(prompt if self.sampling.repetition_penalty != 1.0 else (), output)

    def draft_probabilities(self, position: int, guesses: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """[guesses, vocab] what `guesses` at `position` were drawn from, if this device drew them."""
        drafts = self.drafts
        if drafts is None or drafts.position != position or drafts.token_ids[: len(guesses)] != tuple(guesses):
            return None
        return drafts.probabilities

    def resume_at(self, num_tokens: int) -> None:
        """Take back tokens that the scheduler didn't take: it knows `num_tokens`."""
        self.pop(max(0, len(self.token_ids) - num_tokens))

    def push(self, token_id: int) -> bool:
        """Move the state over one more output token; False, and no move, if the grammar doesn't allow it."""
        if self.matcher is not None and not self.matcher.push(token_id):
            return False
        self.token_ids.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)
        return True

    def pop(self, count: int) -> None:
        """Undo the latest `count` pushes."""
        if count == 0:
            return
        if self.matcher is not None:
            self.matcher.pop(count)
        for _ in range(count):
            token_id = self.token_ids.pop()
            if self._counts is not None:
                self._counts.remove(token_id)

    def restrict(self, values: Float32Array) -> None:
        """Apply every rule to logits [vocab] in place, for the position after the row's tokens; in vLLM's order."""
        if self.allowed_ids is not None:
            kept = values[self.allowed_ids]
            values.fill(-np.inf)
            values[self.allowed_ids] = kept
        if self.sampling.bad_words:
            values[self.banned_ids] = -np.inf
            values[self.sequence_bans()] = -np.inf
        if self.num_output_tokens < self.sampling.min_tokens:
            values[self.held_ids] = -np.inf
        values[self.bias_ids] += self.biases
        if self.has_penalties:
            # Made here, not with the row: where penalties are a GPU's the host doesn't count.
            self._counts = self._counts or self._make_counts()
            self._counts.penalise(values, self.sampling)
        if self.matcher is not None:
            self.matcher.restrict(values)

    def sequence_bans(self) -> list[int]:
        """Last tokens of the bad sequences whose other tokens the output ends in."""
        return [words[-1] for words in self.bad_sequences if self._output_ends_in(words[:-1])]

    def _output_ends_in(self, words: Sequence[int]) -> bool:
        return self.num_output_tokens >= len(words) and tuple(self.token_ids[-len(words) :]) == words


def restrict_verified(row: Row, values: Float32Array, guesses: Sequence[int]) -> None:
    """Rules of each verified position: values [len(guesses) + 1, vocab], in place.

    Rows behind a guess that the grammar refuses stay as they are: the guess itself is masked, so none of them is used.
    """
    pushed = 0
    row.restrict(values[0])
    for index, token_id in enumerate(guesses):
        if not row.push(token_id):
            break
        pushed += 1
        row.restrict(values[index + 1])
    row.pop(pushed)


def _ids(token_ids: Iterable[int], vocab_size: int) -> IntArray:
    """Those that the model has; a ban of a token that can't come needs no rule."""
    return np.array(sorted({i for i in token_ids if 0 <= i < vocab_size}), dtype=np.int64)


def _checked(token_ids: Iterable[int], vocab_size: int, name: str) -> IntArray:
    ids = list(token_ids)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RowError(f"{name} names token {token_id}; the model has tokens 0 to {vocab_size - 1}")
    return np.array(ids, dtype=np.int64)
