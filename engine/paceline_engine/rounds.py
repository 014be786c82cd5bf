"""Several steps of one plan in one round trip, for any device that can make one.

The first step is the plan's own. Rows that may go on then compute the token that they just sampled and sample the next
one, in the blocks that the plan gave them, until they have had their steps or have ended. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline_engine.core.outputs import ScheduledRequest, StepPlan, StepResult
from paceline_engine.records import replace


def in_rounds(
    plan: StepPlan, one_step: Callable[[StepPlan], Sequence[StepResult]], has_ended: Callable[[str], bool]
) -> list[StepResult]:
    """The plan's results, those of its further steps joined to them. `has_ended`: whether a row's output is over.

    What goes wrong in a further step is left to the step that meets it first: it is computed again with the next plan.
    """
    results = list(one_step(plan))
    items = [item for item in plan.scheduled if item.num_steps > 1]
    if not items:
        return results
    joined = {result.request_id: result for result in results}
    latest: Iterable[StepResult] = results
    while items:
        by_id = {result.request_id: result for result in latest if result.error is None}
        items = [
            _next_share(item, by_id[item.request_id])
            for item in items
            if item.num_steps > 1 and item.request_id in by_id and not has_ended(item.request_id)
        ]
        latest = one_step(StepPlan(scheduled=tuple(items))) if items else ()
        for result in latest:
            if result.error is None:
                joined[result.request_id] = _join(joined[result.request_id], result)
    return list(joined.values())


def _next_share(item: ScheduledRequest, result: StepResult) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=item.request_id,
        token_ids=[result.token_ids[-1]],
        start=item.end,
        new_block_ids=[],
        sample=True,
        num_steps=item.num_steps - 1,
    )


def _join(first: StepResult, later: StepResult) -> StepResult:
    """Guesses for the next step are those of the last one: what a grammar forces earlier is sampled like any token."""
    return replace(
        first,
        token_ids=first.token_ids + later.token_ids,
        logprobs=first.logprobs + later.logprobs,
        draft_token_ids=later.draft_token_ids,
    )
