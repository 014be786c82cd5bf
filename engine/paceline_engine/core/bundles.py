"""Outputs that nobody reads before the answer is whole, held back and joined.

Each output wakes the API process up, on a CPU engine on the CPUs that the kernels run on. What a request yields first
goes out at once, as does its end with all that is held; between them, several steps' tokens go as one. Imports neither
tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from paceline_engine.messages import RequestOutput
from paceline_engine.records import replace

# Of one bundle, unless its last step yielded several at once: counters of tokens lag behind by so many.
BUNDLE_TOKENS = 16


class Bundles:
    """The held outputs of each request that wants bundles, with the times of their steps."""

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[float, RequestOutput]]] = {}
        self._begun: set[str] = set()

    def follow(self, request_id: str) -> None:
        """From now on hold this request's outputs back, but for the first."""
        self._held.setdefault(request_id, [])

    def take(self, outputs: Iterable[RequestOutput], now: float) -> list[RequestOutput]:
        """What is to be sent of a step's outputs and of those held."""
        return [sent for output in outputs if (sent := self._next(output, now)) is not None]

    def _next(self, output: RequestOutput, now: float) -> RequestOutput | None:
        request_id = output.request_id
        held = self._held.get(request_id)
        if held is None:
            return output
        if output.finish_reason is not None:
            del self._held[request_id]
            self._begun.discard(request_id)
        elif request_id not in self._begun:
            self._begun.add(request_id)
            return output
        held.append((now, output))
        if output.finish_reason is None and sum(len(each.new_token_ids) for _, each in held) < BUNDLE_TOKENS:
            return None
        made = output if len(held) == 1 else _joined(held, now)
        held.clear()
        return made


def _joined(held: list[tuple[float, RequestOutput]], now: float) -> RequestOutput:
    """One output that says what all of them do; the last says how the request stands."""
    outputs = [output for _, output in held]
    return replace(
        outputs[-1],
        new_token_ids=tuple(chain.from_iterable(output.new_token_ids for output in outputs)),
        logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
        num_draft_tokens=sum(output.num_draft_tokens for output in outputs),
        num_accepted_tokens=sum(output.num_accepted_tokens for output in outputs),
        ages=tuple(now - at for at, output in held if output.new_token_ids),
    )
