"""What is planned beyond the next token: guesses to verify, further steps in one round trip, a step on top of another.

None of it makes anybody lose blocks, or changes an output. Imports neither tensors nor I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline_engine.core.kv_manager import KVManager
from paceline_engine.core.outputs import UNKNOWN, ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.ranked import RankedRequests
from paceline_engine.core.request import Request, RequestStatus
from paceline_engine.records import replace


def room_ahead(request: Request, kv: KVManager, num_running: int) -> int:
    """Tokens behind the next one that end before the request must, and whose blocks leave one for each that runs."""
    num_tokens = len(request.token_ids)
    spare = max(0, kv.pool.num_free_blocks - num_running)
    slots = (len(request.block_ids) + spare) * kv.block_size
    # The last sampled token must still be within the request's length; its KV is not computed yet.
    return min(request.max_total_tokens - num_tokens - 1, slots - num_tokens)


def is_plain_decode(item: ScheduledRequest, request: Request) -> bool:
    """Whether the share computes one known token, not of the prompt, and nobody guesses."""
    return (
        item.sample
        and len(item.token_ids) == 1
        and item.num_wanted_drafts == 0
        and item.start >= request.num_prompt_tokens
    )


def with_more_steps(
    scheduled: Sequence[ScheduledRequest], requests: Mapping[str, Request], kv: KVManager, num_running: int, limit: int
) -> list[ScheduledRequest]:
    """The shares with up to `limit` steps each, and the blocks for them; unchanged if one is no plain decode."""
    if limit < 2 or not all(is_plain_decode(item, requests[item.request_id]) for item in scheduled):
        return list(scheduled)
    longer: list[ScheduledRequest] = []
    for item in scheduled:
        request = requests[item.request_id]
        num_more = min(limit - 1, room_ahead(request, kv, num_running))
        if num_more > 0:
            block_ids = item.new_block_ids + kv.grow_if_free(request, item.end + num_more)
            item = replace(item, new_block_ids=block_ids, num_steps=1 + num_more)
        longer.append(item)
    return longer


def steps_made(plan: StepPlan, results: Mapping[str, StepResult]) -> tuple[int, int]:
    """How many steps the device made of a plan, and the tokens that it computed behind the first one."""
    num_steps, num_more_tokens = 1, 0
    for item in plan.scheduled:
        result = results.get(item.request_id)
        if item.num_steps > 1 and result is not None and result.token_ids:
            num_steps = max(num_steps, len(result.token_ids))
            num_more_tokens += len(result.token_ids) - 1
    return num_steps, num_more_tokens


def assume(plan: StepPlan, requests: Mapping[str, Request]) -> None:
    """Take the plan as done, with one token for each request that samples, so that the next step can be planned.

    One that ends with that token for its length is left without anything to compute. `update` puts things right.
    """
    for item in plan.scheduled:
        request = requests.get(item.request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            continue
        request.num_computed_tokens = item.end
        if item.sample and len(request.token_ids) + 1 < request.max_total_tokens:
            request.token_ids.append(UNKNOWN)


def needs_results(running: RankedRequests, waiting: RankedRequests, kv: KVManager, max_num_seqs: int) -> bool:
    """Whether the next step depends on the last one's results, or KV may have to be moved by it.

    A grammar may force tokens. A victim's KV is saved, and a returning one's restored, at once: not while the device
    computes, and blocks that results would have freed are not worth a victim.
    """
    if any(request.grammar_id is not None for request in running):
        return True
    if sum(kv.num_missing_blocks(request, request.num_tokens + 1) for request in running) > kv.pool.num_free_blocks:
        return True
    return any(request.num_offloaded_tokens for request in waiting.requests[:max_num_seqs])
