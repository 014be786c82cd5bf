"""A model on the device, behind the interface that the runner knows: a batch from the host in, logits on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline_engine.backends.triton.adapters import DeviceAdapters
from paceline_engine.backends.triton.batch import DeviceBatch
from paceline_engine.backends.triton.decoder import TritonDecoder
from paceline_engine.backends.triton.graphs import DecodeGraphs
from paceline_engine.backends.triton.inputs import LatestTokens, filled_in, step_inputs, unknown_slots
from paceline_engine.backends.triton.parallel import TensorParallel
from paceline_engine.backends.triton.ranks import Message, Ranks
from paceline_engine.backends.triton.staging import upload
from paceline_engine.batch import Batch
from paceline_engine.kernels.attention import choose_num_segments
from paceline_engine.kernels.common import num_processors_of
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.decoder import HiddenRows
from paceline_engine.paged_kv import PagedKV


class TritonModel:
    """A `PagedModel`. latest: where tokens are that the host doesn't know yet; None where it always does.

    ranks, parallel: of a model that is spread; rank 0's `step` then has the others `follow`.
    """

    def __init__(
        self,
        decoder: TritonDecoder,
        device: torch.device,
        latest: LatestTokens | None = None,
        *,
        ranks: Ranks | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._latest = latest
        self._ranks = ranks
        self._parallel = parallel
        self._num_processors = num_processors_of(device)
        self._graphs: DecodeGraphs | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's geometry."""
        return self._decoder.config

    @property
    def adapters(self) -> DeviceAdapters:
        """What requests' adapters are looked up in."""
        return self._decoder.adapters

    def first_layers(self, count: int) -> TritonModel:
        """This model without its later layers, sharing the weights: a drafter for it."""
        return TritonModel(self._decoder.first_layers(count), self._device)

    def record_decodes(self, kv: PagedKV, *, max_num_seqs: int, max_model_len: int) -> DecodeGraphs:
        """Run decode steps over `kv` as CUDA graphs from now on; the graphs, to be captured."""
        kv_heads = kv.tensor.shape[4]
        self._graphs = DecodeGraphs(
            lambda batch: self._decoder.forward(batch, kv),
            max_num_seqs=max_num_seqs,
            max_blocks=-(-max_model_len // kv.block_size),
            vocab_size=self.config.vocab_size,
            device=self._device,
            choose_segments=lambda size: choose_num_segments(size, kv_heads, max_model_len, self._num_processors),
        )
        return self._graphs

    def step(
        self, batch: Batch, kv: PagedKV, adapters: Sequence[str | None] = (), states: HiddenRows | None = None
    ) -> torch.Tensor:
        """See `PagedModel.step`. Waits for the device only where states are wanted."""
        inputs = step_inputs(batch, kv.tensor.shape[4], self._num_processors)
        slots = None if self._latest is None else unknown_slots(batch, self._latest)
        if self._ranks is not None:
            self._ranks.send_step(inputs, has_unknown=slots is not None)
        moved = inputs.on(self._device)
        if slots is not None and self._latest is not None:
            places = upload({"slots": slots}, self._device)["slots"]
            known = filled_in(moved.token_ids, places, self._latest.last_tokens)
            moved = replace(moved, token_ids=known if self._parallel is None else self._parallel.broadcast(known))
        groups = self.adapters.groups(adapters, [item.num_tokens for item in batch.items]) if adapters else None
        if self._graphs is not None and inputs.is_decode and groups is None:
            return self._graphs.run(moved)
        wanted = None if states is None else _on_device(states, self._device)
        logits = self._decoder.forward(moved, kv, groups, wanted)
        if states is not None and wanted is not None:
            states.out.copy_(wanted.out)
        return logits

    @torch.inference_mode()
    def follow(self, message: Message, kv: PagedKV) -> None:
        """Make rank 0's step with this rank's part."""
        assert message.inputs is not None
        assert self._parallel is not None
        moved = message.inputs.on(self._device)
        if message.has_unknown:
            moved = replace(moved, token_ids=self._parallel.broadcast(moved.token_ids))
        if self._graphs is not None and message.inputs.is_decode:
            self._graphs.run(moved)
        else:
            self._decoder.forward(moved, kv)

    def largest_step(self, kv: PagedKV, num_tokens: int, num_sequences: int) -> None:
        """Run a step of so many tokens over any KV, to see what memory it takes.

        With logits of all of them: a prompt's logprobs may be asked for, and guesses are verified.
        """
        num_sequences = min(num_sequences, num_tokens)
        counts = [num_tokens // num_sequences + (at < num_tokens % num_sequences) for at in range(num_sequences)]
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        longs = {"dtype": torch.int64, "device": self._device}
        batch = DeviceBatch(
            token_ids=torch.zeros(num_tokens, **longs),
            positions=torch.cat([torch.arange(count) for count in counts]).to(self._device),
            slots=torch.full((num_tokens,), -1, **longs),
            begins=torch.nn.functional.pad(ends, (1, 0)).to(self._device),
            context_lens=torch.tensor(counts, dtype=torch.int32, device=self._device),
            block_tables=torch.zeros(
                (num_sequences, -(-max(counts) // kv.block_size)), dtype=torch.int32, device=self._device
            ),
            logits_rows=torch.arange(num_tokens, **longs),
            max_query_len=max(counts),
            num_segments=1,
        )
        self._decoder.forward(batch, kv)


def _on_device(states: HiddenRows, device: torch.device) -> HiddenRows:
    """Room for the same rows on the device."""
    return HiddenRows(states.rows.to(device), states.out.to(device))
