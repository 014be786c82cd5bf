"""Few combinations of parameters in which any two values of any two parameters meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

_CANDIDATES = 30


def pairwise(parameters: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Combinations, greedily chosen: each is the best of some random ones that hold a pair which is still missing."""
    names, draw = list(parameters), random.Random(seed)

    def pairs(choice: Mapping[str, Any]) -> set[tuple[str, str, str, str]]:
        return {(a, repr(choice[a]), b, repr(choice[b])) for a, b in itertools.combinations(names, 2)}

    missing = {
        (a, repr(x), b, repr(y))
        for a, b in itertools.combinations(names, 2)
        for x in parameters[a]
        for y in parameters[b]
    }
    chosen: list[dict[str, Any]] = []
    while missing:
        a, x, b, y = min(missing)
        fixed = {
            a: next(value for value in parameters[a] if repr(value) == x),
            b: next(value for value in parameters[b] if repr(value) == y),
        }
        candidates = [
            {name: draw.choice(list(values)) for name, values in parameters.items()} | fixed for _ in range(_CANDIDATES)
        ]
        best = max(candidates, key=lambda choice: len(pairs(choice) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def name_of(case: Mapping[str, Any]) -> str:
    """A combination's values as a test's name."""
    return "-".join(map(str, case.values()))
