"""Greedy equality with transformers: a token may differ only at a proven tie, and ties are told apart and bounded.

Sums in another order move float32 logits by some 1e-4. Where transformers itself has two tokens closer together than
TIE_MARGIN, either is right; from there on the continuation of our token must be transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIE_MARGIN = 5e-4


@dataclass(frozen=True)
class Tie:
    """A token that differs where transformers' logits of both are `gap` apart."""

    name: str
    position: int
    ours: int
    theirs: int
    gap: float

    def __str__(self) -> str:
        return (
            f"request {self.name}, token {self.position}: {self.ours} for {self.theirs}, whose logit is {self.gap:.2g} "
            f"higher (margin {TIE_MARGIN:g})"
        )


def most_ties(num_requests: int) -> int:
    """How many ties are believable; more are a fault that happens to be small."""
    return max(1, num_requests // 10)


def find_ties(
    checkpoint: Any,
    prompts: Mapping[str, Sequence[int]],
    ours: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    margin: float = TIE_MARGIN,
) -> list[Tie]:
    """Where the outputs differ. AssertionError if one differs but by ties, or if there are too many of them."""
    ties: list[Tie] = []
    for name, tokens in expected.items():
        wanted, got = list(tokens), list(ours[name])
        assert len(got) == len(wanted), f"request {name} has {len(got)} tokens, transformers {len(wanted)}"
        while got != wanted:
            at = next(index for index, token in enumerate(got) if token != wanted[index])
            gap = checkpoint.reference_gap([*prompts[name], *got[:at]], got[at])
            tie = Tie(name, at, got[at], wanted[at], gap)
            assert gap < margin, f"not transformers' token, and no tie: {tie}"
            ties.append(tie)
            known = got[: at + 1]
            wanted = known + checkpoint.reference_tokens([*prompts[name], *known], len(wanted) - at - 1)
    assert len(ties) <= most_ties(len(expected)), f"too many ties to be chance: {', '.join(map(str, ties))}"
    return ties
