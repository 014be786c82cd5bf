"""A device without weights: it sleeps as long as a step would take and answers with tokens from a hash.

For fleet tests, where two cores can't feed several real engines. The rest of the process is the real one. A step of n
tokens takes alpha + beta * n milliseconds, the linear step-time model of iteration-level batching; calibrate both from
a real engine. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

from paceline_engine.core.kv_manager import SequenceStore
from paceline_engine.core.outputs import ScheduledRequest, StepPlan, StepResult


class SimulatedBackend:
    """Tokens depend on (seed, prompt, position) alone: not on the batch, the chunking or a preemption.

    The prompt enters as a running hash of all tokens up to the one sampled from; `sleep` takes seconds.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seed: int,
        alpha_ms: float,
        beta_ms: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._alpha_ms = alpha_ms
        self._beta_ms = beta_ms
        self._sleep = sleep
        self._context_hashes: dict[str, bytes] = {}

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

    def step_seconds(self, num_tokens: int) -> float:
        """Modelled duration of a step."""
        return (self._alpha_ms + self._beta_ms * num_tokens) / 1000.0

    def execute(self, plan: StepPlan) -> Sequence[StepResult]:
        """Sleep for the step, then one token for each request that samples."""
        for request_id in plan.released:
            self._context_hashes.pop(request_id, None)
        if not plan.scheduled:
            return ()
        self._sleep(self.step_seconds(plan.num_tokens))
        contexts = [(item, self._extend_context(item)) for item in plan.scheduled]
        return [
            StepResult(item.request_id, (self._token(context, item.end),)) for item, context in contexts if item.sample
        ]

    def _extend_context(self, item: ScheduledRequest) -> bytes:
        context = b"" if item.start == 0 else self._context_hashes[item.request_id]
        # One token at a time, so that the hash doesn't depend on where a prefill was cut into chunks.
        for token_id in item.token_ids:
            context = blake2b(context + token_id.to_bytes(8, "little"), digest_size=16).digest()
        self._context_hashes[item.request_id] = context
        return context

    def _token(self, context: bytes, position: int) -> int:
        key = self._seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
        digest = blake2b(context, digest_size=8, key=key).digest()
        return int.from_bytes(digest, "little") % self._vocab_size
