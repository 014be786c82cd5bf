"""Throw-away samples at start, so that no request waits while a kernel of its sampling is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch

from paceline_engine.backends.triton.sampler import TritonSampler
from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest
from paceline_engine.messages import SamplingParams
from paceline_engine.sampling.row import Row
from paceline_engine.sampling.speculation import Drafts

_REQUEST_ID = "warm-up"


def warm_up_sampler(sampler: TritonSampler, vocab_size: int, device: torch.device) -> None:
    """Launch every combination of arguments that steps launch kernels with. Takes the memory of penalties' counts."""
    for sampling, guesses, drafts in _cases(vocab_size):
        admitted = AdmittedRequest(
            request_id=_REQUEST_ID,
            token_ids=(0,),
            num_prompt_tokens=1,
            sampling=SamplingParams(max_tokens=2, **sampling),
        )
        row = Row(admitted, vocab_size, ())
        row.drafts = drafts
        item = ScheduledRequest(
            request_id=_REQUEST_ID,
            token_ids=[0, *guesses],
            start=0,
            new_block_ids=[],
            sample=True,
            num_draft_tokens=len(guesses),
        )
        sampler.admit(row)
        sampler.sample(torch.zeros(1 + len(guesses), vocab_size, device=device), [item], [row])
        sampler.release(_REQUEST_ID)


def _cases(vocab_size: int) -> Iterator[tuple[dict[str, Any], list[int], Drafts | None]]:
    """(sampling, guesses, what they were drawn from)."""
    rules = {"logit_bias": ((0, 0.0),), "logprobs": 0}
    cuts: tuple[dict[str, float], ...] = ({}, {"top_p": 0.9})
    evenly = np.full((1, vocab_size), 1.0 / vocab_size, dtype=np.float32)
    for cut, drafts in product(cuts, (None, Drafts(position=1, token_ids=(0,), probabilities=evenly))):
        yield {"temperature": 1.0, **cut, **rules}, [], None
        yield {"temperature": 1.0, **cut, "presence_penalty": 1.0}, [0], drafts
