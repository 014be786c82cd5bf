"""A step is handed to the device without waiting for it, or launching ahead would be worth nothing.

The device is torch's "meta" here: nothing is computed, but every copy that would be made is.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import BLOCK_SIZE, MAX_MODEL_LEN, make_config
from torch.utils._python_dispatch import TorchDispatchMode

from paceline_engine.backends.triton.adapters import DeviceAdapters
from paceline_engine.backends.triton.batch import DeviceBatch
from paceline_engine.backends.triton.model import TritonModel
from paceline_engine.batch import BlockTables, build_batch
from paceline_engine.core.outputs import UNKNOWN, AdmittedRequest, ScheduledRequest, StepPlan
from paceline_engine.kernels.lora import RowGroups
from paceline_engine.messages import SamplingParams
from paceline_engine.paged_kv import PagedKV

META = torch.device("meta")
CONFIG = make_config()


class Copies(TorchDispatchMode):
    """How many copies from the host to the device were queued, and how many were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.queued = 0
        self.waited_for = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_upload = func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device
        if is_upload and kwargs.get("non_blocking"):
            self.queued += 1
        elif is_upload or (func is torch.ops.aten.copy_.default and args[0].device != args[1].device):
            self.waited_for += 1
        return func(*args, **kwargs)


class Decoder:
    """Keeps what it is called with."""

    config = CONFIG

    def __init__(self, adapters: DeviceAdapters) -> None:
        self.adapters = adapters
        self.calls: list[tuple[DeviceBatch, RowGroups | None]] = []

    def forward(self, batch: DeviceBatch, _kv: PagedKV, groups: RowGroups | None, _states: Any) -> torch.Tensor:
        self.calls.append((batch, groups))
        return torch.empty(len(batch.logits_rows), CONFIG.vocab_size, device=META)


class Latest:
    last_tokens = torch.empty(5, dtype=torch.int64, device=META)

    def slot(self, request_id: str) -> int:
        return int(request_id)


def test_a_step_on_tokens_that_only_the_device_knows_waits_for_no_copy():
    """Nor does one in which requests have adapters."""
    adapters = DeviceAdapters(CONFIG, torch.float32, META, max_adapters=2, max_rank=4)
    adapters._order = {"tuned": 0}
    decoder: Any = Decoder(adapters)
    tables = BlockTables(4, MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
    sampling = SamplingParams(max_tokens=3)
    items = tuple(
        ScheduledRequest(request_id=name, token_ids=[UNKNOWN], start=2, new_block_ids=[int(name)], sample=True)
        for name in ("1", "2")
    )
    admitted = tuple(
        AdmittedRequest(request_id=item.request_id, token_ids=(3, 4), num_prompt_tokens=2, sampling=sampling)
        for item in items
    )
    tables.apply(StepPlan(admitted=admitted, scheduled=items))
    batch = build_batch(items, tables, torch.float32)
    kv = PagedKV(CONFIG, 8, BLOCK_SIZE, torch.float32, device=META)
    with Copies() as copies:
        TritonModel(decoder, META, Latest()).step(batch, kv, ["tuned", None])
    batch_there, groups = decoder.calls[0]
    assert batch_there.token_ids.device == groups.rows.device == groups.begins.device == META
    assert copies.waited_for == 0
    # The step's arrays, where its unknown tokens are, and whose rows are whose.
    assert copies.queued == 3
