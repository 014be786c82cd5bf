"""Tiny random checkpoints of every architecture, and sequences that are stepped over paged KV beside the CPU's decoder.

The CPU's decoder, which other tests hold to transformers, sees each whole sequence at once, with attention in plain
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline_engine.backends.triton.batch import DeviceBatch
from paceline_engine.kernels.attention import paged_attention_reference
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import Decoder
from paceline_engine.models.layers import load_layer
from paceline_engine.models.lora import LayerDeltas
from paceline_engine.paged_kv import PagedKV

MAX_MODEL_LEN = 32
BLOCK_SIZE = 4

LLAMA: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
GEMMA: dict[str, Any] = {"norm_offset": 1.0, "hidden_act": "gelu_tanh", "embedding_scale": 48**0.5}
GEMMA2 = {**GEMMA, "post_norms": True, "attention_scale": 24**-0.5, "sliding_window": 7, "sliding_layers": (0,)}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 4, "num_kv_heads": 2},
    "llama-biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "num_kv_heads": 2},
    "llama-3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral-window": {"sliding_window": 7, "sliding_layers": (0, 1), "head_dim": 20},
    "qwen2-yarn": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3": {"qk_norm": True, "num_heads": 6, "num_kv_heads": 2},
    "smollm3": {"no_rope_layers": (1,)},
    "gemma": {**GEMMA, "tie_word_embeddings": True},
    "gemma2": {**GEMMA2, "attention_softcap": 2.0, "logit_softcap": 3.0},
    "gemma3": {**GEMMA2, "qk_norm": True, "local_rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
}


def make_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**LLAMA, **changes})


class RandomWeights:
    """Stands in for a checkpoint's files, and makes up each tensor that is asked for."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        spread = 0.3 if len(shape) == 2 else 0.1
        self.tensors[name] = torch.randn(shape) * spread
        return self.tensors[name]

    def take_norm(self, name: str, size: int, offset: float) -> torch.Tensor:
        self.tensors[name] = torch.randn(size) * 0.3 + 1 - offset
        return self.tensors[name]


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, under Hugging Face names."""
    torch.manual_seed(seed)
    made: Any = RandomWeights()
    made.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        load_layer(made, config, index)
    made.take_norm("model.norm.weight", config.hidden_size, config.norm_offset)
    if not config.tie_word_embeddings:
        made.take("lm_head.weight", config.vocab_size, config.hidden_size)
    return made.tensors


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return [folder / "model.safetensors"]


@dataclass
class Member:
    """A sequence's tokens, how many of them are in the KV, and the logits [vocab] at their positions."""

    tokens: list[int]
    blocks: list[int]
    num_computed: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


# One step: (sequence, number of tokens) of each share, in the batch's order.
Shares = Sequence[tuple[int, int]]
# A chunk, a prefill beside another chunk, a decode beside a prefill, guesses to verify beside decodes.
SCHEDULE: tuple[Shares, ...] = (
    ((0, 8),),
    ((1, 7), (0, 5)),
    ((0, 1), (2, 2), (1, 1)),
    ((2, 1), (1, 2), (0, 1)),
)


class Sequences:
    """Three sequences over one pool whose blocks are dealt at random; what is unwritten is NaN where it can be."""

    def __init__(self, config: ModelConfig, *, kv_dtype: torch.dtype = torch.float32, **kv: Any) -> None:
        self.config = config
        torch.manual_seed(7)
        per_sequence = MAX_MODEL_LEN // BLOCK_SIZE
        blocks = torch.randperm(3 * per_sequence).view(3, per_sequence).tolist()
        tokens = torch.randint(0, config.vocab_size, (3, 16)).tolist()
        self.members = [
            Member(tokens=known[:length], blocks=mine)
            for known, length, mine in zip(tokens, (13, 7, 2), blocks, strict=True)
        ]
        self.kv = PagedKV(config, 3 * per_sequence, BLOCK_SIZE, kv_dtype, **kv)
        if kv_dtype.itemsize > 1:
            self.kv.tensor.fill_(torch.nan)

    def batch(self, shares: Shares, *, every_row: bool, num_segments: int = 1) -> DeviceBatch:
        """A step over `shares`; logits of every token, or of each share's last."""
        members = [self.members[index] for index, _ in shares]
        counts = [count for _, count in shares]
        spans = [range(one.num_computed, one.num_computed + count) for one, count in zip(members, counts, strict=True)]
        ends = torch.tensor(counts).cumsum(0)
        tables = [one.blocks for one in members]
        slots = [
            one.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for one, span in zip(members, spans, strict=True)
            for place in span
        ]
        return DeviceBatch(
            token_ids=torch.tensor(
                [one.tokens[place] for one, span in zip(members, spans, strict=True) for place in span]
            ),
            positions=torch.tensor([place for span in spans for place in span]),
            slots=torch.tensor(slots),
            begins=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
            context_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            logits_rows=torch.arange(int(ends[-1])) if every_row else ends - 1,
            max_query_len=max(counts),
            num_segments=num_segments,
        )

    def step(self, forward: Callable[[DeviceBatch], torch.Tensor], shares: Shares, **options: Any) -> None:
        """Run a step; a sequence whose known tokens are all computed goes on with its likeliest next one.

        Where the share has more tokens than are known, the others are guesses, and stay whatever they are.
        """
        for index, count in shares:
            member = self.members[index]
            while len(member.tokens) < member.num_computed + count:
                member.tokens.append((member.tokens[-1] * 7 + 1) % self.config.vocab_size)
        batch = self.batch(shares, every_row=True, **options)
        rows = iter(forward(batch))
        for index, count in shares:
            member = self.members[index]
            for _ in range(count):
                member.logits[member.num_computed] = next(rows)
                member.num_computed += 1
            if len(member.tokens) == member.num_computed:
                member.tokens.append(int(member.logits[member.num_computed - 1].argmax()))

    def run(
        self, forward: Callable[[DeviceBatch], torch.Tensor], schedule: Sequence[Shares] = SCHEDULE, **options: Any
    ) -> Sequences:
        """All steps of a schedule."""
        for shares in schedule:
            self.step(forward, shares, **options)
        return self

    def logits(self, index: int) -> torch.Tensor:
        """[computed tokens, vocab] of one sequence."""
        return torch.stack(list(self.members[index].logits.values()))

    def computed(self, index: int) -> torch.Tensor:
        """The computed tokens of one sequence."""
        member = self.members[index]
        return torch.tensor(member.tokens[: member.num_computed])

    def stored(self, index: int, layer: int) -> Vectors:
        """A sequence's keys and values as the 8-bit pool holds them, in float32."""
        assert self.kv.scales is not None
        places = torch.arange(self.members[index].num_computed)
        ids, offsets = torch.tensor(self.members[index].blocks)[places // BLOCK_SIZE], places % BLOCK_SIZE
        key, value = (
            self.kv.tensor[layer, half, ids, offsets].float() * self.kv.scales[layer, half, ids, offsets, :, None]
            for half in (0, 1)
        )
        return key, value


# Keys and values [tokens, kv_heads, head_dim] of a layer.
Vectors = tuple[torch.Tensor, torch.Tensor]


def reference_logits(
    decoder: Decoder,
    token_ids: torch.Tensor,
    deltas: Sequence[LayerDeltas] | None = None,
    replaced: Callable[[int, Vectors], Vectors] = lambda layer, vectors: vectors,
) -> torch.Tensor:
    """[tokens, vocab] of a whole sequence by the CPU's decoder. replaced: what stands in the KV for a layer's own."""
    layers, length = decoder.config.attention_layers(), len(token_ids)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = replaced(layer, (key, value))
        return paged_attention_reference(
            query,
            key[:, None],
            value[:, None],
            torch.arange(length)[None],
            torch.tensor([0, length]),
            torch.tensor([length]),
            scale=layers[layer].scale,
            window=layers[layer].window,
            softcap=layers[layer].softcap,
        )

    rows = torch.arange(length)
    return decoder.forward(token_ids, rows, rows, attend, deltas)
