"""Drives a scheduler without a model: the test says which tokens are sampled, and every invariant is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline_engine.core.block_pool import BlockPool
from paceline_engine.core.kv_manager import KVManager, SequenceStore
from paceline_engine.core.outputs import ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.prefix_cache import PrefixCache, PrefixIndex
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.messages import AddRequest, RequestOutput, SamplingParams

EOS = 99


def make(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    seqs: int = 8,
    budget: int = 32,
    chunk: int = 16,
    max_len: int = 64,
    max_waiting: int = 100,
    store: SequenceStore | None = None,
    speculation: SpeculationConfig | None = None,
    cache: PrefixIndex | None = None,
    **config: Any,
) -> Scheduler:
    bounds = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        prefill_chunk_tokens=chunk,
        max_model_len=max_len,
        max_num_waiting=max_waiting,
        **config,
    )
    pool = BlockPool(num_blocks)
    kv = KVManager(pool, block_size, store, PrefixCache(pool, block_size, cache) if cache else None)
    return Scheduler(bounds, kv, eos_token_ids=(EOS,), speculation=speculation)


def request(request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, **options: Any) -> AddRequest:
    """`prompt` is token ids, or how many equal ones. Options are those of AddRequest, all others of SamplingParams."""
    tokens = (7,) * prompt if isinstance(prompt, int) else tuple(prompt)
    mine = {name: options.pop(name) for name in list(options) if name in AddRequest.__struct_fields__}
    sampling = SamplingParams(max_tokens=max_tokens, **options)
    return AddRequest(request_id=request_id, prompt_token_ids=tokens, sampling=sampling, **mine)


def add(
    scheduler: Scheduler, request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, now: float = 0.0, **options
) -> RequestOutput | None:
    return scheduler.add(request(request_id, prompt, max_tokens, **options), now)


Device = Callable[[ScheduledRequest], StepResult]


def step(
    scheduler: Scheduler, device: int | Device = 1, now: float = 0.0, seconds: float = 0.0
) -> tuple[StepPlan, list[RequestOutput]]:
    """One step. `device` answers each share that samples; a number is that token for all, every guess rejected."""
    plan = scheduler.schedule(now)
    scheduler.check_integrity()
    answer = device if callable(device) else lambda item: StepResult(item.request_id, (device,))
    outputs = scheduler.update(plan, [answer(item) for item in plan.scheduled if item.sample], now + seconds, seconds)
    scheduler.check_integrity()
    return plan, outputs


def shares(plan: StepPlan) -> dict[str, int]:
    return {item.request_id: item.num_tokens for item in plan.scheduled}


def finish_all(scheduler: Scheduler, max_steps: int = 500, device: int | Device = 1) -> dict[str, str | None]:
    reasons: dict[str, str | None] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            return reasons
        for output in step(scheduler, device)[1]:
            if output.finish_reason is not None:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
    raise AssertionError("requests are stuck")


class Script:
    """A device that continues every request by a fixed text, keeping the guesses that agree with it."""

    def __init__(self, text: Sequence[int], guesses: int = 0, wrong_from: int | None = None) -> None:
        """The text starts at position 0. `guesses`: how many to return as drafts; from `wrong_from` on, wrong ones."""
        self.text = list(text)
        self.guesses = guesses
        self.wrong_from = wrong_from

    def __call__(self, item: ScheduledRequest) -> StepResult:
        position, kept = item.num_known_tokens, 0
        guesses = item.token_ids[len(item.token_ids) - item.num_draft_tokens :]
        while kept < len(guesses) and guesses[kept] == self.text[position + kept]:
            kept += 1
        end = position + kept + 1
        drafts = self.text[end : end + min(self.guesses, item.num_wanted_drafts)]
        if self.wrong_from is not None:
            drafts = [token if i < self.wrong_from else token + 1000 for i, token in enumerate(drafts)]
        return StepResult(item.request_id, tuple(self.text[position:end]), draft_token_ids=tuple(drafts))
