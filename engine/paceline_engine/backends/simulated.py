"""A device without weights: it sleeps as long as a step would take and answers with tokens from a hash.

For fleet tests, where two cores can't feed several real engines. The rest of the process is the real one. A step of n
tokens takes alpha + beta * n milliseconds, the linear step-time model of iteration-level batching; calibrate both from
a real engine. Imports no torch.
"""

from __future__ import annotations

import math
import random
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from paceline_engine.core.kv_manager import SequenceStore
from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan, StepResult
from paceline_engine.messages import TokenLogprobs
from paceline_engine.rounds import in_rounds


class _Row:
    """A running request: its known tokens, and a running hash of the first `num_hashed` of them."""

    __slots__ = ("context", "ending_ids", "num_hashed", "num_prompt_tokens", "refusal", "sampling", "token_ids")

    def __init__(self, admitted: AdmittedRequest, eos_token_ids: Iterable[int]) -> None:
        self.token_ids = list(admitted.token_ids)
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.sampling = admitted.sampling
        self.refusal = "the simulated device knows no grammars" if admitted.grammar_id is not None else None
        self.ending_ids = {*admitted.sampling.stop_token_ids}
        if not admitted.sampling.ignore_eos:
            self.ending_ids.update(eos_token_ids)
        self.context = b""
        self.num_hashed = 0

    @property
    def has_ended(self) -> bool:
        """Whether the latest output token ends the output."""
        num_output = len(self.token_ids) - self.num_prompt_tokens
        return num_output > self.sampling.min_tokens and self.token_ids[-1] in self.ending_ids

    def hash_all(self) -> bytes:
        """One token at a time, so that the hash doesn't depend on where a prefill was cut or what was found cached."""
        for token_id in self.token_ids[self.num_hashed :]:
            self.context = _extend(self.context, token_id)
        self.num_hashed = len(self.token_ids)
        return self.context


class SimulatedBackend:
    """Tokens depend on (seed, known tokens) alone: not on the batch, chunks, cached prefixes, guesses or preemption.

    Logprobs are those of a uniform distribution. Where guesses are wanted, each is right with probability `acceptance`.
    `sleep` takes seconds.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seed: int,
        alpha_ms: float,
        beta_ms: float,
        eos_token_ids: Iterable[int] = (),
        hidden_size: int = 64,
        acceptance: float = 0.8,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._alpha_ms = alpha_ms
        self._beta_ms = beta_ms
        self._eos_token_ids = frozenset(eos_token_ids)
        self._hidden_size = hidden_size
        self._acceptance = acceptance
        self._sleep = sleep
        self._rows: dict[str, _Row] = {}

    @property
    def kv_store(self) -> SequenceStore | None:
        """None: there's no KV to keep, preempted sequences are recomputed in simulated time."""
        return None

    @property
    def kv_store_bytes(self) -> int:
        """Always 0."""
        return 0

    @property
    def stats(self) -> dict[str, float]:
        """No counters."""
        return {}

    @property
    def draft_cost(self) -> float | None:
        """0: it knows its own next tokens."""
        return 0.0

    def release_kv(self) -> None:
        """Nothing is held."""

    def allocate_kv(self) -> None:
        """Nothing is needed."""

    def step_seconds(self, num_tokens: int) -> float:
        """Modelled duration of a step."""
        return (self._alpha_ms + self._beta_ms * num_tokens) / 1000.0

    def execute(self, plan: StepPlan) -> Sequence[StepResult]:
        """Sleep for each of the plan's steps, then answer each request that samples."""
        return in_rounds(plan, self._execute_once, lambda request_id: self._rows[request_id].has_ended)

    def _execute_once(self, plan: StepPlan) -> Sequence[StepResult]:
        for request_id in plan.released:
            self._rows.pop(request_id, None)
        for admitted in plan.admitted:
            self._rows[admitted.request_id] = _Row(admitted, self._eos_token_ids)
        if not plan.scheduled:
            return ()
        self._sleep(self.step_seconds(plan.num_tokens))
        return [result for item in plan.scheduled if (result := self._answer(item)) is not None]

    def _answer(self, item: ScheduledRequest) -> StepResult | None:
        row = self._rows[item.request_id]
        if row.refusal is not None:
            return StepResult(item.request_id, error=row.refusal)
        scored: tuple[TokenLogprobs, ...] = ()
        if row.sampling.prompt_logprobs is not None:
            ahead = row.token_ids[item.start + 1 : min(item.end + 1, row.num_prompt_tokens)]
            scored = tuple(map(self._logprob, ahead))
        if item.embed:
            return StepResult(item.request_id, embedding=self._embedding(row.hash_all()))
        if not item.sample:
            return StepResult(item.request_id, prompt_logprobs=scored) if scored else None
        tokens = self._verify(row, item)
        row.token_ids += tokens
        return StepResult(
            item.request_id,
            tuple(tokens),
            logprobs=tuple(map(self._logprob, tokens)) if row.sampling.logprobs is not None else (),
            prompt_logprobs=scored,
            draft_token_ids=self._guess(row, item.num_wanted_drafts),
        )

    def _verify(self, row: _Row, item: ScheduledRequest) -> list[int]:
        """The guesses that are what this device says anyway, and one token more."""
        context, position = row.hash_all(), len(row.token_ids)
        tokens = [self._token(context, position)]
        for guess in item.token_ids[len(item.token_ids) - item.num_draft_tokens :]:
            if guess != tokens[-1]:
                break
            context, position = _extend(context, guess), position + 1
            tokens.append(self._token(context, position))
        return tokens

    def _guess(self, row: _Row, count: int) -> tuple[int, ...]:
        if count == 0:
            return ()
        context, position = row.hash_all(), len(row.token_ids)
        guesses: list[int] = []
        for _ in range(count):
            token = self._token(context, position)
            right = int.from_bytes(context[:4], "little") < self._acceptance * 2**32
            guesses.append(token if right else (token + 1) % self._vocab_size)
            context, position = _extend(context, token), position + 1
        return tuple(guesses)

    def _embedding(self, context: bytes) -> bytes:
        """A unit vector of the tokens' hash."""
        draw = random.Random(self._seed.to_bytes(8, "little", signed=True) + context)
        values = [draw.gauss() for _ in range(self._hidden_size)]
        norm = math.sqrt(sum(value * value for value in values))
        return struct.pack(f"<{len(values)}f", *(value / norm for value in values))

    def _logprob(self, token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -math.log(self._vocab_size), 1)

    def _token(self, context: bytes, position: int) -> int:
        key = self._seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
        digest = blake2b(context, digest_size=8, key=key).digest()
        return int.from_bytes(digest, "little") % self._vocab_size


def _extend(context: bytes, token_id: int) -> bytes:
    return blake2b(context + token_id.to_bytes(8, "little"), digest_size=16).digest()
