"""Runs step plans on a paged model: rows, index tensors, forward pass, sampling, drafting.

Holds what outlives a step on the device side: weights, KV memory, block tables and the state of running requests.
Decides nothing; the scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from paceline_engine.batch import Batch, BlockTables, build_batch
from paceline_engine.core.outputs import UNKNOWN, AdmittedRequest, ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.spec import MAX_DRAFT_TOKENS
from paceline_engine.drafting import Drafter, DraftModel
from paceline_engine.grammar import Grammars
from paceline_engine.messages import SamplingParams, TokenLogprobs
from paceline_engine.models.decoder import HiddenRows
from paceline_engine.paged_kv import PagedKV
from paceline_engine.paged_model import PagedModel
from paceline_engine.records import replace
from paceline_engine.rounds import in_rounds
from paceline_engine.sampling.row import Matcher, Row, RowError
from paceline_engine.sampling.sampler import Sampler


class TokenSampler(Protocol):
    """Draws tokens on the device where the logits are."""

    def admit(self, row: Row) -> None:
        """A request begins to run, anew after a preemption."""
        ...

    def release(self, request_id: str) -> None:
        """A request doesn't run any more; it may never have."""
        ...

    def needs_tokens(self, row: Row) -> bool:
        """Whether the row's next token depends on what only the host makes of the tokens before it."""
        ...

    def launch(
        self, logits: torch.Tensor, items: Sequence[ScheduledRequest], rows: Sequence[Row]
    ) -> Callable[[], list[StepResult]]:
        """Start to sample as `sampling.sampler.Sampler.sample` does; the answer waits for the results."""
        ...

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Log probabilities of a token of each row of logits [rows, vocab], and of the row's likeliest."""
        ...


class Launched:
    """A step under way. finish: waits for the device and makes the results; called once."""

    def __init__(self, finish: Callable[[], list[StepResult]]) -> None:
        self._finish: Callable[[], list[StepResult]] | None = finish
        self._results: list[StepResult] = []

    @property
    def is_done(self) -> bool:
        """Whether the results are there, and rows stand behind the step's tokens."""
        return self._finish is None

    def results(self) -> list[StepResult]:
        """Wait for the device. Steps must be waited for in the order of their launches."""
        if self._finish is not None:
            self._results = self._finish()
            self._finish = None
        return self._results


class ModelRunner:
    """One model with its KV pool.

    num_blocks: of the block pool; kv may have more, for a drafter's scratch. lenience: 1 is exact speculation, see
    `sampling.speculation`. grammars: None where constraints can't be followed. draft_model: None where nobody drafts.
    sampler: None draws on the host. around_launch: entered while a step's work is handed to the device.
    """

    def __init__(
        self,
        decoder: PagedModel,
        kv: PagedKV,
        *,
        max_num_seqs: int,
        max_model_len: int,
        lenience: float = 1.0,
        grammars: Grammars | None = None,
        draft_model: DraftModel | None = None,
        num_blocks: int | None = None,
        sampler: TokenSampler | None = None,
        around_launch: Callable[[StepPlan], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.kv = kv
        self._decoder = decoder
        max_blocks = -(-max_model_len // kv.block_size)
        self._tables = BlockTables(max_num_seqs, max_blocks, kv.block_size)
        self._rows: dict[str, Row] = {}
        self._around_launch = around_launch
        self._grammars = grammars
        host_sampler = Sampler(decoder.config.vocab_size, lenience)
        self._sampler: TokenSampler = sampler or host_sampler
        self._last = Launched(list)
        self._last.results()
        self._drafter = draft_model and Drafter(
            draft_model,
            host_sampler,
            num_blocks=num_blocks or kv.num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[StepResult]:
        """Compute the plan's KV and tokens for each request that samples.

        A prompt's logprobs come with the chunk that yields them, also from one that doesn't sample.
        """
        return in_rounds(
            plan, lambda each: self.launch(each).results(), lambda request_id: self._rows[request_id].has_ended
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start one step, on a device that can also on top of one that hasn't been waited for."""
        self._apply(plan)
        if not plan.scheduled:
            return Launched(list)
        if not self._last.is_done and any(
            self._sampler.needs_tokens(self._rows[item.request_id]) for item in plan.scheduled if item.sample
        ):
            self._last.results()
        plan = replace(plan, scheduled=tuple(map(self._resolved, plan.scheduled)))
        batch = build_batch(plan.scheduled, self._tables, self.kv.tensor.dtype, self._is_scored)
        with self._around_launch(plan):
            logits, embedded = self._forward(batch)
            num_sampled = sum(item.num_draft_tokens + 1 for item in batch.samplers)
            scores = self._score_prompts(logits[num_sampled:], batch)
            rows = [self._rows[item.request_id] for item in batch.samplers]
            for item, row in zip(batch.samplers, rows, strict=True):
                row.resume_at(item.num_known_tokens)
            sampled = self._sampler.launch(logits[:num_sampled], batch.samplers, rows)
        others = embedded + self._errors(plan)

        def finish() -> list[StepResult]:
            results = [_advance(row, result) for row, result in zip(rows, sampled(), strict=True)]
            if self._drafter is not None:
                results = self._draft(self._drafter, plan, results)
            return others + _with_scores(results, scores)

        self._last = Launched(finish)
        return self._last

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, list[StepResult]]:
        """Logits of the batch's logits_rows, and the answers to its embedders."""
        adapters = [self._rows[item.request_id].adapter for item in batch.items]
        states = HiddenRows.of(batch.embed_rows, self._decoder.config) if batch.embedders else None
        logits = self._decoder.step(batch, self.kv, adapters, states)
        return logits, [] if states is None else _embeddings(batch.embedders, states.out)

    def _resolved(self, item: ScheduledRequest) -> ScheduledRequest:
        """The share with the token that the scheduler doesn't know yet; any, where the row has failed and has none.

        It stays unknown where the last step hasn't been waited for: the device has it.
        """
        if item.token_ids[-1] != UNKNOWN:
            return item
        known = self._rows[item.request_id].token_ids[item.start : item.end]
        return replace(item, token_ids=known or [0 if self._last.is_done else UNKNOWN])

    def _errors(self, plan: StepPlan) -> list[StepResult]:
        """Requests that can't run say so with their first share; those that sample have a result anyway."""
        errors = ((item, self._rows[item.request_id].error) for item in plan.scheduled if not item.sample)
        return [
            StepResult(item.request_id, error=str(error), error_kind=error.kind)
            for item, error in errors
            if error is not None
        ]

    def _draft(self, drafter: Drafter, plan: StepPlan, results: Sequence[StepResult]) -> list[StepResult]:
        """Results with the drafter's guesses, where some were wanted and the grammar forces none."""
        finished = {
            result.request_id
            for result in results
            if result.error is not None or result.draft_token_ids or self._rows[result.request_id].has_ended
        }
        wanted = [
            item.num_wanted_drafts if item.sample and item.request_id not in finished else 0 for item in plan.scheduled
        ]
        drafter.propose(plan.scheduled, [self._rows[item.request_id] for item in plan.scheduled], wanted)
        return [self._with_drafts(result) for result in results]

    def _with_drafts(self, result: StepResult) -> StepResult:
        drafts = self._rows[result.request_id].drafts
        if drafts is None or result.draft_token_ids:
            return result
        return replace(result, draft_token_ids=drafts.token_ids)

    def _apply(self, plan: StepPlan) -> None:
        self._tables.apply(plan)
        if self._drafter is not None:
            self._drafter.apply(plan)
        for request_id in plan.released:
            self._rows.pop(request_id, None)
            self._sampler.release(request_id)
        for admitted in plan.admitted:
            row = self._make_row(admitted)
            self._rows[admitted.request_id] = row
            self._sampler.admit(row)

    def _make_row(self, admitted: AdmittedRequest) -> Row:
        config = self._decoder.config
        try:
            if admitted.adapter is not None and admitted.adapter not in self._decoder.adapters:
                raise RowError(f"the adapter {admitted.adapter!r} isn't loaded", "invalid")
            return Row(admitted, config.vocab_size, config.eos_token_ids, self._matcher(admitted))
        except RowError as error:
            plain = SamplingParams(max_tokens=admitted.sampling.max_tokens)
            row = Row(replace(admitted, sampling=plain), config.vocab_size, config.eos_token_ids)
            row.refusal = error
            return row

    def _matcher(self, admitted: AdmittedRequest) -> Matcher | None:
        if admitted.grammar_id is None:
            return None
        if self._grammars is None:
            raise RowError("this device can't follow constraints; send the request without one")
        output = admitted.token_ids[admitted.num_prompt_tokens :]
        return self._grammars.matcher(admitted.grammar_id, admitted.sampling.stop_token_ids, output)

    def _is_scored(self, item: ScheduledRequest) -> bool:
        return self._num_scored(item) > 0

    def _num_scored(self, item: ScheduledRequest) -> int:
        """How many of the share's tokens are followed by a prompt token whose logprob is asked for."""
        row = self._rows[item.request_id]
        # Where output is known already, its first token went out, and the prompt's logprobs with it.
        if row.sampling.prompt_logprobs is None or row.had_output:
            return 0
        return min(item.end, row.num_prompt_tokens - 1) - item.start

    def _score_prompts(self, logits: torch.Tensor, batch: Batch) -> dict[str, tuple[TokenLogprobs, ...]]:
        """Logprobs of prompt tokens by request, from logits [tokens of the scored shares, vocab]."""
        scores: dict[str, tuple[TokenLogprobs, ...]] = {}
        begin = 0
        for item in batch.scored:
            row, count = self._rows[item.request_id], self._num_scored(item)
            targets = row.token_ids[item.start + 1 : item.start + 1 + count]
            values = logits[begin : begin + count]
            scores[item.request_id] = tuple(
                self._sampler.score(values, targets, [row.sampling.prompt_logprobs or 0] * count)
            )
            begin += item.num_tokens
        return scores


def _advance(row: Row, result: StepResult) -> StepResult:
    """Move the row over its new tokens; the result with what its grammar forces next, as guesses."""
    for token_id in result.token_ids:
        if not row.push(token_id):
            error = row.error or RowError("the drawn token isn't one that the request's grammar allows")
            return replace(result, token_ids=(), error=str(error), error_kind=error.kind)
    if row.matcher is None or row.has_ended or not result.token_ids:
        return result
    forced = row.matcher.forced_tokens(MAX_DRAFT_TOKENS)
    return replace(result, draft_token_ids=tuple(forced)) if forced else result


def _embeddings(items: Sequence[ScheduledRequest], states: torch.Tensor) -> list[StepResult]:
    """The hidden states [items, hidden] as unit vectors."""
    vectors = torch.nn.functional.normalize(states, dim=-1).numpy().astype("<f4")
    finite = torch.isfinite(states).all(-1).tolist()
    return [
        StepResult(item.request_id, embedding=vector.tobytes())
        if fine
        else StepResult(item.request_id, error="the model's hidden state isn't finite")
        for item, vector, fine in zip(items, vectors, finite, strict=True)
    ]


def _with_scores(results: Sequence[StepResult], scores: dict[str, tuple[TokenLogprobs, ...]]) -> list[StepResult]:
    if not scores:
        return list(results)
    joined = [replace(result, prompt_logprobs=scores.pop(result.request_id, ())) for result in results]
    return joined + [StepResult(request_id, prompt_logprobs=entries) for request_id, entries in scores.items()]
