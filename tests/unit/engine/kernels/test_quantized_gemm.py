"""Products with quantized weights beside their reference, through the interpreter; packing beside the CPU kernels'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pairwise import name_of, pairwise
from quantized_gemm_cases import PARAMETERS, check

from paceline_engine.kernels.quantized_gemm import (
    GROUP,
    GemmTiling,
    choose_tiling,
    dequantize,
    pack_matrix,
    quantized_gemm,
    quantized_gemm_reference,
)
from paceline_engine.models.loader import default_cache_dir
from paceline_engine.native.build import ensure_library, find_compiler
from paceline_engine.native.library import FORMATS, PANEL, load_library
from paceline_engine.native.packed import panel_order


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=name_of)
def test_the_product_is_its_reference(case):
    check(case)


def test_bands_of_row_blocks_cover_the_result():
    torch.manual_seed(0)
    matrix, x = pack_matrix(torch.randn(40, 32), "int8"), torch.randn(11 * 16 + 3, 32)
    tiling = GemmTiling(block_m=16, block_n=16, block_k=32, num_splits=1, num_warps=4, num_stages=1)
    got = quantized_gemm(x, matrix, tiling=tiling)
    torch.testing.assert_close(got, quantized_gemm_reference(x, matrix), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_of_the_form_are_held_exactly(form):
    """All 16 codes of 4 bits, 255 of 8: what rounds to itself once must do so always."""
    largest = 127 if form == "int8" else 15
    codes = torch.arange(64 * 96).reshape(64, 96) % (largest + 1)
    codes[:, ::GROUP], codes[:, 1::GROUP] = largest, 0
    weight = codes * 0.25 if form == "int8" else codes * 0.25 - 2
    assert torch.equal(dequantize(pack_matrix(weight, form)), weight)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("inner", [96, 100])
@pytest.mark.native
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
def test_dequantized_values_are_those_of_the_cpu_kernels(form, inner):
    torch.manual_seed(0)
    weight = torch.randn(70, inner) * torch.rand(70, 1)
    weight[3], weight[4] = 0, 1.5
    ours, theirs = dequantize(pack_matrix(weight, form)), cpu_values(weight, form)
    # Two ranges may be as good as each other but for the rounding of their errors' sum.
    assert float((ours == theirs).float().mean()) > 0.99
    torch.testing.assert_close((ours - weight).norm(), (theirs - weight).norm(), rtol=1e-5, atol=0)


def cpu_values(weight: torch.Tensor, form: str) -> torch.Tensor:
    """What the CPU kernels' packed bytes stand for; layout as in native/src/quant.h."""
    library = load_library(ensure_library(default_cache_dir()))
    columns, inner = weight.shape
    source, order = weight.numpy(), panel_order(columns, False)
    packed = np.zeros(library.paceline_packed_bytes(FORMATS[form], columns, inner), dtype=np.uint8)
    library.paceline_pack(FORMATS[form], source.ctypes.data, order.ctypes.data, columns, inner, packed.ctypes.data, 1)
    panels, groups = -(-columns // PANEL), -(-inner // GROUP)
    head = PANEL * (2 if form == "int8" else 4)
    pieces = packed.reshape(panels, groups, -1)
    scales = pieces[..., : 2 * PANEL].copy().view(np.float16).astype(np.float32)
    quads = pieces[..., head:].reshape(panels, groups, -1, PANEL, 4)
    if form == "int8":
        values = (quads.astype(np.float32) - 128) * scales[:, :, None, :, None]
    else:
        minima = pieces[..., 2 * PANEL : head].copy().view(np.float16).astype(np.float32)
        codes = np.concatenate((quads & 15, quads >> 4), axis=2).astype(np.float32)
        values = codes * scales[:, :, None, :, None] + minima[:, :, None, :, None]
    # [panels, groups, quads, columns, 4] to [columns, inner].
    matrix = values.transpose(0, 3, 1, 2, 4).reshape(panels * PANEL, groups * GROUP)
    return torch.from_numpy(np.ascontiguousarray(matrix[:columns, :inner]))


def test_the_inner_dimension_is_split_only_where_the_device_would_idle():
    device = {"four_bits": False, "itemsize": 2, "num_processors": 132}
    assert choose_tiling(1, 4096, 4096, **device).num_splits > 1
    assert choose_tiling(1, 128256, 4096, **device).num_splits == 1
    assert choose_tiling(1, 576, 288, **device).num_splits == 1
    assert choose_tiling(2048, 576, 4096, **device).num_splits == 1


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("rows", [3, 90])
def test_the_chosen_tilings_give_the_reference(form, rows):
    torch.manual_seed(0)
    matrix, x = pack_matrix(torch.randn(130, 200), form), torch.randn(rows, 200).bfloat16()
    expected = quantized_gemm_reference(x, matrix)
    torch.testing.assert_close(quantized_gemm(x, matrix), expected, atol=0.2, rtol=2**-7)
