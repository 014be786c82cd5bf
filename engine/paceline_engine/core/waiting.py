"""Why requests wait: what is missing, and how much of it.

Requests are admitted strictly in order, so all wait for what the first one waits for. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from paceline_engine.core.request import Request
from paceline_engine.records import Struct

Reason = Literal["blocks", "seqs", "budget", "batch", "prefix", "kv", "preemption"]
REASONS: tuple[Reason, ...] = get_args(Reason)
_SENTENCES: dict[Reason, str] = {
    "blocks": "{missing} KV blocks more must become free",
    "seqs": "a running request must end: as many run as may (max-num-seqs)",
    "budget": "the token budget of the step was used up by running requests (max-num-batched-tokens)",
    "batch": "the batch that runs must end first (batching)",
    "prefix": "{missing} of its tokens are being computed for another request and can be shared in a moment",
    "kv": "{missing} of its tokens are being brought back from the KV store",
    "preemption": "it was preempted as often as may be, and {missing} blocks more are needed to never do it again",
}


class Waiting(Struct, frozen=True, kw_only=True):
    """One waiting request. position: 0 is the next. missing: blocks, places, tokens or, for "batch", seconds if known.

    The reason and the missing quantity are those of the request at position 0, for which the others wait as well.
    """

    request_id: str
    position: int
    priority: int
    reason: Reason
    missing: float
    message: str
    num_tokens: int
    num_preemptions: int
    waited_s: float


def explain(waiting: Iterable[Request], reason: Reason, missing: float, now: float) -> list[Waiting]:
    """Each waiting request, the next one first."""
    text = _SENTENCES[reason].format(missing=f"{missing:g}")
    return [
        Waiting(
            request_id=request.request_id,
            position=position,
            priority=request.priority,
            reason=reason,
            missing=missing,
            message=text if position == 0 else f"{position} requests are ahead; for the first, {text}",
            num_tokens=request.num_tokens,
            num_preemptions=request.num_preemptions,
            waited_s=now - request.arrived_at,
        )
        for position, request in enumerate(waiting)
    ]
