"""Rules on logits before a token is chosen: bans, biases, penalties and grammars' masks, in one pass over the rows.

Order and arithmetic are those of `paceline_engine.sampling.row.Row.restrict`. Everything that only bans commutes, so
allowed ids and a grammar go into one mask, and bad words and ids held back by min_tokens are biases of -inf.

Penalties read a table of counts, one row for each running request, which grows with what is sampled and never crosses
to the host: 4 bytes a token of the vocabulary, 154 MB for 256 requests of 150,000.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is to be done to logits [rows, vocab]; a group of tensors is None where no row has the rule.

    biases: those of row r are entries bias_begins[r] to bias_begins[r + 1], ids int32 ascending and each once, values
    float32; -inf bans, whatever the logit. penalties [rows, 3] float32: repetition, frequency, presence; they are those
    of row count_slots[r] of `counts` [slots, vocab] int32 (see `count_prompt`, `count_output`), or none for -1, as if
    tokens pushed_begins[r] to pushed_begins[r + 1] of pushed_ids had been output too (the guesses ahead of a verified
    position). masks [any, ceil(vocab / 32)] int32, bit i of word w allows token 32 w + i; mask_rows [rows] names each
    row's, -1 none. All indices are int32.
    """

    bias_begins: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    count_slots: torch.Tensor | None = None
    pushed_begins: torch.Tensor | None = None
    pushed_ids: torch.Tensor | None = None
    masks: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None


@triton.jit
def _first_at_least(ids_ptr, low, high, bound):
    """The first of ascending ids[low:high] that isn't below `bound`."""
    while low < high:
        middle = (low + high) // 2
        if tl.load(ids_ptr + middle) < bound:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _biased(values, ids, ids_ptr, values_ptr, begin, end):
    """Values of tokens `ids` with entries [begin, end) added; a ban holds even for a logit of infinity or NaN."""
    for at in range(begin, end):
        bias = tl.load(values_ptr + at)
        is_ban = bias == float("-inf")
        changed = tl.where(is_ban, bias, values + tl.where(is_ban, 0.0, bias))
        values = tl.where(ids == tl.load(ids_ptr + at), changed, values)
    return values


@triton.jit
def _penalised(values, ids, in_vocab, penalties_ptr, counts_ptr, pushed_begins_ptr, pushed_ids_ptr, row):
    """Divided (or multiplied, below 0) by repetition, less frequency for each occurrence, less presence."""
    counts = tl.load(counts_ptr + ids, mask=in_vocab, other=0)
    if pushed_begins_ptr is not None:
        for at in range(tl.load(pushed_begins_ptr + row), tl.load(pushed_begins_ptr + row + 1)):
            counts += tl.where(ids == tl.load(pushed_ids_ptr + at), 2, 0)
    repetition = tl.load(penalties_ptr + row * 3)
    frequency, presence = tl.load(penalties_ptr + row * 3 + 1), tl.load(penalties_ptr + row * 3 + 2)
    occurrences = (counts >> 1).to(tl.float32)
    penalised = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
    penalised = penalised - frequency * occurrences - presence * (occurrences > 0.0).to(tl.float32)
    return tl.where(counts > 0, penalised, values)


@triton.jit
def rules_kernel(
    out_ptr,
    logits_ptr,
    bias_begins_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    penalties_ptr,
    counts_ptr,
    count_slots_ptr,
    pushed_begins_ptr,
    pushed_ids_ptr,
    masks_ptr,
    mask_rows_ptr,
    vocab_size,
    out_stride,
    logits_stride,
    num_words,
    IN_PLACE: tl.constexpr,
    TILE: tl.constexpr,
):
    """See `apply_rules`. Grid: (rows, tiles)."""
    # 64 bits: rows times vocabulary may pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    ids = first + tl.arange(0, TILE)
    in_vocab = ids < vocab_size
    begin, end, slot, mask_row = 0, 0, -1, -1
    if bias_begins_ptr is not None:
        row_end = tl.load(bias_begins_ptr + row + 1)
        begin = _first_at_least(bias_ids_ptr, tl.load(bias_begins_ptr + row), row_end, first)
        end = _first_at_least(bias_ids_ptr, begin, row_end, first + TILE)
    if penalties_ptr is not None:
        slot = tl.load(count_slots_ptr + row)
    if masks_ptr is not None:
        mask_row = tl.load(mask_rows_ptr + row)
    if IN_PLACE and (begin == end and slot < 0 and mask_row < 0):
        return
    values = tl.load(logits_ptr + row * logits_stride + ids, mask=in_vocab, other=0.0).to(tl.float32)
    if bias_begins_ptr is not None:
        values = _biased(values, ids, bias_ids_ptr, bias_values_ptr, begin, end)
    if slot >= 0:
        counts = counts_ptr + slot.to(tl.int64) * vocab_size
        values = _penalised(values, ids, in_vocab, penalties_ptr, counts, pushed_begins_ptr, pushed_ids_ptr, row)
    if mask_row >= 0:
        words = masks_ptr + mask_row.to(tl.int64) * num_words + ids // 32
        allowed = (tl.load(words, mask=in_vocab, other=0) >> (ids % 32)) & 1
        values = tl.where(allowed != 0, values, float("-inf"))
    tl.store(out_ptr + row * out_stride + ids, values, mask=in_vocab)


def apply_rules(logits: torch.Tensor, rules: Rules, *, tile: int = 1024, num_warps: int = 4) -> torch.Tensor:
    """Logits [rows, vocab] after rules, in float32: in place if `logits` are float32, else new."""
    rows, vocab_size = logits.shape
    in_place = logits.dtype == torch.float32
    out = logits if in_place else torch.empty_like(logits, dtype=torch.float32)
    if rows == 0:
        return out
    assert logits.stride(1) == out.stride(1) == 1
    assert rules.counts is None or (rules.counts.is_contiguous() and rules.counts.shape[1] == vocab_size)
    num_words = 0
    if rules.masks is not None:
        assert rules.masks.is_contiguous()
        num_words = rules.masks.shape[1]
        assert num_words * 32 >= vocab_size
    rules_kernel[(rows, triton.cdiv(vocab_size, tile))](
        *(out, logits, rules.bias_begins, rules.bias_ids, rules.bias_values),
        *(rules.penalties, rules.counts, rules.count_slots, rules.pushed_begins, rules.pushed_ids),
        *(rules.masks, rules.mask_rows, vocab_size, out.stride(0), logits.stride(0), num_words),
        IN_PLACE=in_place,
        TILE=tile,
        num_warps=num_warps,
        # A fused multiply-subtract would round otherwise than the CPU.
        enable_fp_fusion=False,
    )
    return out


def count_prompt(counts: torch.Tensor, slot: int, token_ids: torch.Tensor) -> None:
    """Begin a request in row `slot` of `counts` [slots, vocab]: 1 for tokens that occur in its prompt, else 0."""
    counts[slot] = 0
    counts[slot, token_ids] = 1


def count_output(counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """One occurrence more of each token, 2 in `counts` [slots, vocab]; slots and tokens are alike shaped.

    Where either is negative nothing is counted.
    """
    slots, token_ids = slots.long(), token_ids.long()
    is_token = (slots >= 0) & (token_ids >= 0)
    places = torch.where(is_token, slots * counts.shape[1] + token_ids, 0)
    counts.view(-1).index_add_(0, places.flatten(), (2 * is_token).to(counts.dtype).flatten())
