"""Requests for an embedding: scheduled like any prompt, ended by the last of its tokens, without an output token."""

from __future__ import annotations

from driver import add, finish_all, make, request, shares, step

from paceline_engine.backends.simulated import SimulatedBackend
from paceline_engine.core.outputs import StepResult
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.step_log import StepLog, decoded, replay
from paceline_engine.messages import RequestOutput

VECTOR = b"\0\0\x80?"


def embedding_step(scheduler: Scheduler, now: float = 0.0, seconds: float = 0.0, answer: bytes = VECTOR):
    """One step in which the device embeds what is asked for and says 1 elsewhere."""
    plan = scheduler.schedule(now)
    results = [
        StepResult(item.request_id, embedding=answer) if item.embed else StepResult(item.request_id, (1,))
        for item in plan.scheduled
        if item.sample or item.embed
    ]
    outputs = scheduler.update(plan, results, now + seconds)
    scheduler.check_integrity()
    return plan, outputs


def test_it_is_prefilled_in_chunks_among_chats_and_ends_with_the_last():
    scheduler = make(chunk=16, budget=20, cache="hash")
    add(scheduler, "chat", 4)
    step(scheduler)
    add(scheduler, "e", list(range(40)), 1, embed=True)
    seen = [embedding_step(scheduler) for _ in range(3)]
    assert [shares(plan) for plan, _ in seen] == [{"chat": 1, "e": 16}, {"chat": 1, "e": 16}, {"chat": 1, "e": 8}]
    assert [[item.embed for item in plan.scheduled] for plan, _ in seen] == [[False] * 2, [False] * 2, [False, True]]
    assert not any(item.sample for plan, _ in seen for item in plan.scheduled if item.request_id == "e")
    ends = [output for _, outputs in seen for output in outputs if output.request_id == "e"]
    assert ends == [RequestOutput(request_id="e", finish_reason="stop", embedding=VECTOR)]
    add(scheduler, "again", list(range(40)), 1, embed=True)
    plan, outputs = embedding_step(scheduler)
    assert shares(plan)["again"] == 4  # The last block is computed again, for its last token's state.
    assert (outputs[-1].embedding, outputs[-1].num_cached_tokens) == (VECTOR, 36)
    finish_all(scheduler)
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks


def test_no_guesses_are_made_for_it_and_its_length_leaves_no_room_for_output():
    scheduler = make(max_len=32, chunk=32)
    assert add(scheduler, "fits", 32, 1, embed=True) is None
    refused = add(scheduler, "too long", 33, 1, embed=True)
    assert refused is not None and refused.error_kind == "invalid"
    plan, outputs = embedding_step(scheduler)
    assert (plan.scheduled[0].num_draft_tokens, plan.scheduled[0].num_wanted_drafts) == (0, 0)
    assert outputs[0].finish_reason == "stop"


def test_a_device_without_an_answer_fails_the_request_alone():
    scheduler = make()
    add(scheduler, "e", 4, 1, embed=True)
    add(scheduler, "chat", 4)
    _, outputs = embedding_step(scheduler, answer=b"")
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("e", "error"), ("chat", None)]


def test_deadlines_hold_in_the_queue_and_in_the_step_that_ends_it():
    scheduler = make(chunk=4, seqs=1)
    add(scheduler, "e", 8, 1, e2e_s=5.0, embed=True)
    add(scheduler, "waits", 4, 1, e2e_s=1.0, embed=True)
    embedding_step(scheduler, now=0.0)
    _, outputs = embedding_step(scheduler, now=2.0)
    assert {output.request_id: output.finish_reason for output in outputs} == {"e": "stop", "waits": "deadline"}
    add(scheduler, "late", 4, 1, ttft_s=1.0, embed=True)
    _, (late,) = embedding_step(scheduler, now=0.0, seconds=3.0)
    assert (late.finish_reason, late.embedding) == ("deadline", b"")
    assert "for the embedding" in str(late.error)
    assert scheduler.num_deadline_misses == 2


def test_an_abort_between_two_chunks_ends_it_once():
    scheduler = make(chunk=4)
    add(scheduler, "e", 12, 1, embed=True)
    embedding_step(scheduler)
    aborted = scheduler.abort("e")
    assert aborted is not None and aborted.finish_reason == "abort"
    assert embedding_step(scheduler)[1] == []


def test_the_step_log_replays_it_from_its_arrival_and_from_its_middle():
    scheduler = make(chunk=4)
    log = StepLog(scheduler, max_weight=40)
    message = request("e", 12, 1, embed=True)
    log.begin()
    log.added(message, 0.0)
    scheduler.add(message, 0.0)
    for now in range(3):
        log.begin()
        plan = scheduler.schedule(float(now))
        results = tuple(StepResult(item.request_id, embedding=VECTOR) for item in plan.scheduled if item.embed)
        log.planned(float(now), plan)
        log.updated(results, now + 0.5)
        scheduler.update(plan, results, now + 0.5)
    segments = decoded(log.encoded())
    assert [len(segment.state.requests) for segment in segments] == [0, 1]
    assert [replay(segment) for segment in segments] == [None, None]


def test_simulated_embeddings_are_unit_vectors_of_the_tokens_alone():
    def embed(chunk: int, tokens: list[int], seed: int = 0) -> memoryview:
        device = SimulatedBackend(
            vocab_size=100, seed=seed, alpha_ms=0.0, beta_ms=0.0, hidden_size=12, sleep=lambda _: None
        )
        scheduler = make(chunk=chunk)
        add(scheduler, "e", tokens, 1, embed=True)
        while scheduler.has_work:
            plan = scheduler.schedule()
            for output in scheduler.update(plan, device.execute(plan)):
                return memoryview(output.embedding).cast("f")
        raise AssertionError("no output")

    vector = embed(16, [5, 6, 7, 8, 9])
    assert len(vector) == 12
    assert abs(sum(value * value for value in vector) - 1.0) < 1e-5
    assert embed(2, [5, 6, 7, 8, 9]) == vector
    assert embed(16, [5, 6, 7, 9, 8]) != vector
    assert embed(16, [5, 6, 7, 8, 9], seed=1) != vector


def test_one_that_asks_for_scores_of_its_prompt_as_well_is_refused_at_once():
    refusal = add(make(), "e", list(range(4)), 1, embed=True, prompt_logprobs=1)
    assert refusal is not None and "without prompt_logprobs" in str(refusal.error)
