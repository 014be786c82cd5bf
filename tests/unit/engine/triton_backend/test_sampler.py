"""The device's sampler beside the CPU's, through the interpreter: equal logits give equal results, step by step."""

from __future__ import annotations

import operator
import random
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from packed import MODULUS, CountingDown
from twins import EOS, Twins

from paceline_engine.sampling.sampler import distribution

VOCAB_SIZE = 97
STOP = 17

# Their search is what takes the interpreter long.
CUTS = st.sampled_from([{}] * 7 + [{"top_k": 1}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.8}, {"min_p": 0.1}])
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.4]),
        "grammar": st.sampled_from([False, False, True]),
        "ignore_eos": st.booleans(),
    },
    optional={
        "presence_penalty": st.sampled_from([-1.5, 1.0]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "logit_bias": st.just(((96, 3.0), (4, -5.0), (3, 2.0))),
        "allowed_token_ids": st.just(tuple(range(1, 60))),
        "bad_words": st.sampled_from([((3,),), ((5,), (4, 6), (7, 8, 9))]),
        "min_tokens": st.sampled_from([1, 3]),
        "stop_token_ids": st.just((STOP,)),
        "logprobs": st.sampled_from([0, 3]),
    },
)

REQUESTS = st.builds(operator.or_, SETTINGS, CUTS)


def counting_down(output: list[int]) -> CountingDown:
    matcher = CountingDown(VOCAB_SIZE)
    matcher.path = output
    return matcher


class Schedule:
    """Steps drawn at random: who runs, what is guessed, what is taken, who is preempted or new."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins = twins
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.num_admitted = 0

    def admit(self, sampling: dict[str, Any]) -> None:
        # Few different tokens, so that words and penalties meet what is drawn.
        sampling = dict(sampling)
        matcher = counting_down if sampling.pop("grammar") else None
        prompt = [self.random.randrange(10) for _ in range(self.random.randint(1, 8))]
        seed = self.random.getrandbits(64)
        self.twins.admit(str(self.num_admitted), prompt, matcher=matcher, seed=seed, **sampling)
        self.num_admitted += 1

    def step(self) -> None:
        requests = self.twins.requests
        running = [request_id for request_id in requests if self.random.random() < 0.8] or list(requests)
        guesses = {request_id: self.guesses(request_id) for request_id in running}
        logits = torch.cat([part for _, part in guesses.values()])
        if self.random.random() < 0.2:
            logits[self.random.randrange(len(logits)), 5] = self.random.choice([torch.nan, torch.inf, -torch.inf])
        for result in self.twins.step(logits, {key: tokens for key, (tokens, _) in guesses.items()}, running):
            if result.error is not None:
                self.twins.release(result.request_id)
                continue
            taken = len(result.token_ids)
            self.twins.take(result, taken if self.random.random() < 0.7 else self.random.randint(1, taken))
            if requests[result.request_id].has_ended:
                self.twins.release(result.request_id)
        if requests and self.random.random() < 0.3:
            self.twins.preempt(self.random.sample(list(requests), self.random.randint(1, len(requests))))

    def guesses(self, request_id: str) -> tuple[list[int], torch.Tensor]:
        """Some guesses, and the logits [guesses + 1, vocab] that verify them: often what they were guessed from."""
        request = self.twins.requests[request_id]
        logits = self.numbers.normal(size=(self.random.choice([1, 1, 2, 4]), VOCAB_SIZE)).astype(np.float32) * 3
        logits[:, :10] += 2
        row, tokens = request.rows[0], []
        drawn_from = [logits[0] if row.greedy else distribution(row, each).astype(np.float32) for each in logits[:-1]]
        last = request.known[-1]
        for values, q in zip(logits, drawn_from, strict=False):
            choice = self.random.random()
            if choice < 0.1:
                last = EOS
            elif row.greedy:
                last = int(values.argmax()) if choice < 0.7 else self.random.randrange(10)
            elif request.matcher is not None and choice < 0.7:
                last = (last - 1) % MODULUS + MODULUS
            else:
                last = int(self.numbers.choice(VOCAB_SIZE, p=q / q.sum(dtype=np.float64)))
            tokens.append(last)
        # What q excludes isn't drawn from it. Refused where p is q, rounding alone would choose its replacement.
        could_be = all(q[token_id] > 0.0 for q, token_id in zip(drawn_from, tokens, strict=True))
        if tokens and could_be and not row.greedy and self.random.random() < 0.5:
            self.twins.draft(request_id, tokens, np.stack(drawn_from))
        return tokens, torch.from_numpy(logits)


# The interpreter is too slow to look for a smaller failure.
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.lists(st.builds(operator.or_, SETTINGS, CUTS), min_size=1, max_size=6),
    st.sampled_from([1.0, 1.0, 0.6]),
    st.integers(0, 10**6),
)
def test_any_requests_get_what_the_cpu_gives_them(requests, lenience, seed):
    """Over steps with guesses, bad logits, preemptions and slots that pass from one request to another."""
    schedule = Schedule(Twins(VOCAB_SIZE, max_num_seqs=3, lenience=lenience), seed)
    waiting = list(requests)
    for _ in range(5):
        while waiting and len(schedule.twins.requests) < 3:
            schedule.admit(waiting.pop())
        if not schedule.twins.requests:
            break
        schedule.step()
