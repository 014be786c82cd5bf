"""The activation of a gated MLP, from the fused product of its gate and up projections (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def gated_activation_kernel(out_ptr, gate_up_ptr, gate_up_stride, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """See `gated_activation`. Grid: (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    gates = gate_up_ptr + token * gate_up_stride + columns
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + inner, mask=mask, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        slope = _SQRT_8_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    result = gate * tl.sigmoid(slope) * up
    tl.store(out_ptr + token * inner + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def gated_activation(gate_up: torch.Tensor, hidden_act: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """act(gate) * up [tokens, inner], in float32, of gate_up [tokens, 2 * inner], rows any stride apart.

    hidden_act: as in the model's configuration, "silu" or "gelu_tanh".
    """
    assert hidden_act in ("silu", "gelu_tanh")
    num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, inner), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if num_tokens == 0:
        return out
    assert gate_up.stride(1) == 1
    assert out.is_contiguous()
    block = min(1024, triton.next_power_of_2(inner))
    gated_activation_kernel[(num_tokens, triton.cdiv(inner, block))](
        *(out, gate_up, gate_up.stride(0), inner), GELU=hidden_act == "gelu_tanh", BLOCK=block, num_warps=4
    )
    return out


def gated_activation_reference(gate_up: torch.Tensor, hidden_act: str) -> torch.Tensor:
    """What `gated_activation` computes, in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = F.silu(gate) if hidden_act == "silu" else F.gelu(gate, approximate="tanh")
    return (activated * up).to(gate_up.dtype)
