"""Blocks of the paged KV between the pool and a contiguous buffer, all layers in one launch.

The buffer is what a copy engine then moves to or from pinned memory in one transfer: the pool's own pieces are too
small for that. Bytes are moved as they are, so any type and any pool will do, scales of 8-bit KV included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(to_ptr, from_ptr, to_ids_ptr, from_ids_ptr, to_blocks, from_blocks, words, BLOCK: tl.constexpr):
    """Copy block from_ids[i] to to_ids[i] of every plane; ids of None are 0, 1, 2, ... Grid: (ids, planes)."""
    index, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    to_id, from_id = index, index
    if to_ids_ptr is not None:
        to_id = tl.load(to_ids_ptr + index).to(tl.int64)
    if from_ids_ptr is not None:
        from_id = tl.load(from_ids_ptr + index).to(tl.int64)
    to_ptr += (plane * to_blocks + to_id) * words
    from_ptr += (plane * from_blocks + from_id) * words
    for first in range(0, words, BLOCK):
        places = first + tl.arange(0, BLOCK)
        mask = places < words
        tl.store(to_ptr + places, tl.load(from_ptr + places, mask=mask), mask=mask)


def _planes(tensor: torch.Tensor) -> torch.Tensor:
    """tensor [layers, 2, blocks, ...] as [planes, blocks, words], in the widest words of which a block is whole."""
    assert tensor.is_contiguous()
    planes = tensor.view(torch.uint8) if tensor.dim() > 3 else tensor.unsqueeze(-1).view(torch.uint8)
    planes = planes.flatten(3).flatten(0, 1)
    for word in (torch.int64, torch.int32, torch.int16):
        if planes.shape[2] % word.itemsize == 0 and planes.data_ptr() % word.itemsize == 0:
            return planes.view(word)
    return planes


def _copy(
    to: torch.Tensor, from_: torch.Tensor, to_ids: torch.Tensor | None, from_ids: torch.Tensor | None, num_ids: int
) -> None:
    assert to.dtype == from_.dtype
    to, from_ = _planes(to), _planes(from_)
    planes, _, words = to.shape
    assert (from_.shape[0], from_.shape[2], from_.dtype) == (planes, words, to.dtype)
    if num_ids == 0 or words == 0:
        return
    block = min(1024, triton.next_power_of_2(words))
    copy_blocks_kernel[(num_ids, planes)](
        *(to, from_, to_ids, from_ids, to.shape[1], from_.shape[1], words), BLOCK=block, num_warps=4
    )


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Blocks of `pool` [layers, 2, blocks, ...] into `staging` [layers, 2, ids, ...], in the order of block_ids."""
    assert staging.shape[2] == block_ids.shape[0]
    _copy(staging, pool, None, block_ids, block_ids.shape[0])


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """The reverse of `gather_blocks`: each id may occur once."""
    assert staging.shape[2] == block_ids.shape[0]
    _copy(pool, staging, block_ids, None, block_ids.shape[0])


def gather_blocks_reference(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """What `gather_blocks` does, in torch."""
    staging.copy_(pool[:, :, block_ids.long()])


def scatter_blocks_reference(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """What `scatter_blocks` does, in torch."""
    pool[:, :, block_ids.long()] = staging
