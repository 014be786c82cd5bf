"""Why two prompts share cached KV up to some token and no further. Pure: token ids in, one explanation out.

KV is cached in full blocks, chained from the first token and from what the cache is keyed by: the tenant's salt and the
adapter. The last token of a prompt is always computed, for its logits are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as the engine reads it. strings: text of each token. origin: what its template was given, by name."""

    name: str
    token_ids: Sequence[int]
    strings: Sequence[str]
    salt: str = ""
    model: str = ""
    origin: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What two prompts share. Counts are tokens; first_difference is None where one is the beginning of the other."""

    num_tokens: tuple[int, int]
    num_common: int
    num_reused: int
    block_size: int
    first_difference: int | None
    reasons: tuple[str, ...]


def compare(a: Prompt, b: Prompt, block_size: int) -> Sharing:
    """What an engine that computed A can reuse for B."""
    common = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
    num_common = min(len(a.token_ids), len(b.token_ids)) if common is None else common
    reasons: list[str] = []
    if a.model != b.model:
        reasons.append(f"the models or adapters differ ({a.model!r} and {b.model!r}): nothing is shared between them")
    if a.salt != b.salt:
        reasons.append("the cache salts differ: tenants with different salts share nothing")
    apart = bool(reasons)
    num_full = num_common // block_size * block_size
    num_reused = 0 if apart else min(num_full, (len(b.token_ids) - 1) // block_size * block_size)
    if common is not None:
        reasons += _difference(a, b, common)
    if num_common > num_full:
        reasons.append(
            f"only full blocks of {block_size} tokens are shared: the last {num_common - num_full} equal tokens are not"
        )
    if not apart and num_reused < num_full:
        reasons.append(f"the last token of {b.name} is always computed, so its last block is not reused")
    if not apart and common is None and not reasons:
        reasons.append("one is the beginning of the other: all of its full blocks are shared")
    return Sharing(
        num_tokens=(len(a.token_ids), len(b.token_ids)),
        num_common=num_common,
        num_reused=num_reused,
        block_size=block_size,
        first_difference=common,
        reasons=tuple(reasons),
    )


def _difference(a: Prompt, b: Prompt, at: int) -> list[str]:
    """The first token that differs, and what of the requests explains it."""
    made = [
        f"token {at} differs: {a.name} has {a.strings[at]!r} ({a.token_ids[at]}) and {b.name} has "
        f"{b.strings[at]!r} ({b.token_ids[at]}), behind {''.join(a.strings[max(0, at - CONTEXT_TOKENS) : at])!r}"
    ]
    made += [
        f"{name} differs, and stands in the prompt before everything that follows it"
        for name in a.origin.keys() | b.origin.keys()
        if a.origin.get(name) != b.origin.get(name)
    ]
    rest_a, rest_b = "".join(a.strings[at:]), "".join(b.strings[at:])
    if rest_a[:20] == rest_b[:20]:
        made.append("the text there is the same and was cut into other tokens: what follows it differs")
    elif at == 0:
        made.append("they differ from the first token: a text that changes (a date, a name) belongs at the end")
    return made
