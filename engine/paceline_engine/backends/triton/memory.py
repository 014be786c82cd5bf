"""How much of a GPU's memory KV may have.

The engine may use a share of the card. Of that, weights, activations of the largest step and what sampling needs are
measured; KV gets the rest. What other processes use is theirs, and comes out of the share that is left to everybody.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
# CUDA graphs keep their own activations and launch parameters.
GRAPHS_BYTES = 512 * MIB
# As large as float32 logits: those of the decode graphs, those of rows that report logprobs, the penalties' counts.
_LOGITS_COPIES = 3
# Of the cuts.
_SCRATCH_VALUES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes of one card. total: all of it; others: used by other processes; peak: torch's in the largest step."""

    total: int
    others: int
    peak: int


def sampling_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """What sampling of so many rows takes at most."""
    return 4 * max_num_seqs * (_LOGITS_COPIES * vocab_size + _SCRATCH_VALUES)


def kv_bytes(profile: MemoryProfile, utilization: float, *, reserved: int = 0) -> int:
    """What is left for KV of the share `utilization` of the card. reserved: for what the profile hasn't seen.

    Raises ValueError where nothing is left.
    """
    allowed = min(int(profile.total * utilization), profile.total - profile.others)
    left = allowed - profile.peak - reserved
    if left <= 0:
        taken = {"weights and activations": profile.peak, "graphs and sampling": reserved}
        if profile.others > profile.total - int(profile.total * utilization):
            taken["other processes"] = profile.others
        parts = ", ".join(f"{name} {size // MIB} MiB" for name, size in taken.items())
        raise ValueError(
            f"no memory is left for KV: of the GPU's {profile.total // MIB} MiB, gpu-memory-utilization {utilization} "
            f"allows {allowed // MIB} MiB, and these are needed: {parts}; raise gpu-memory-utilization, lower "
            "max-num-batched-tokens or max-num-seqs, quantize the weights, or spread the model over more GPUs"
        )
    return left
