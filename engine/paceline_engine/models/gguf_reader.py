"""Reads a GGUF file: architecture record, Hugging Face tensor names, dequantised values, tokenizer metadata.

The `gguf` package maps the file and dequantises with numpy. What llama.cpp's converter changed is undone here: tensor
names, and the row order of the Llama family's query and key projections (interleaved rope pairs back to halves, as in
`LlamaModel.permute` of convert_hf_to_gguf.py). No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType
from gguf.gguf_reader import GGUFReader
from gguf.quants import _type_traits, dequantize

from paceline_engine.models.errors import ModelError
from paceline_engine.models.gguf_config import FAMILIES, Metadata, check_rope_factors, model_config

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# With norms after attention and MLP too, Hugging Face's post_attention_layernorm is the one after attention.
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Kept as stored; everything else is dequantised to float32, which holds a quantised product (16-bit scale times a
# small integer, plus a 16-bit minimum) with no or one rounding, where 16-bit formats would lose bits of every weight.
_STORED_AS_IS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor under its Hugging Face name. `dtype` is safetensors' name; `index` is its place in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    index: int
    permuted_heads: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor once converted."""
        return int(np.prod(self.shape, dtype=np.int64)) * (4 if self.dtype == "F32" else 2)


class GGUFModel:
    """An open GGUF file. Raises ModelError, naming the file, for anything it can't serve."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._metadata: dict[str, Any] = {}
        self.architecture = str(self.get("general.architecture") or "")
        self._keys = Metadata(path, self.architecture, self.get)
        if self.architecture not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise self._keys.error(f"architecture {self.architecture!r} is not supported", f"use one of {known}")
        shapes = {tensor.name: _shape(tensor) for tensor in self._reader.tensors}
        self.config = model_config(self._keys, shapes, self._rope_factors())
        self._layer_names = _LAYER | (_POST_NORMS if self.config.post_norms else {})
        self.tensors = tuple(self._tensor_infos())

    def get(self, key: str) -> Any:
        """Value of a metadata key, or None. Arrays come as lists."""
        if key not in self._metadata:
            field = self._reader.get_field(key)
            self._metadata[key] = None if field is None else field.contents()
        return self._metadata[key]

    def values(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        """The tensor's converted values, shape `info.shape`; BF16 comes as its bit pattern (uint16)."""
        tensor = self._reader.get_tensor(info.index)
        if info.dtype == "BF16":
            values = np.ascontiguousarray(tensor.data).view(np.uint16)
        elif info.dtype == tensor.tensor_type.name:
            values = np.asarray(tensor.data)
        else:
            values = dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape(info.shape)
        return values if info.permuted_heads is None else unpermute(values, info.permuted_heads)

    def _rope_factors(self) -> tuple[float, ...]:
        found = [tensor for tensor in self._reader.tensors if tensor.name == _ROPE_FACTORS]
        return check_rope_factors(self._keys, np.asarray(found[0].data)) if found else ()

    def _tensor_infos(self) -> Iterator[TensorInfo]:
        permutes = FAMILIES[self.architecture][2]
        for index, tensor in enumerate(self._reader.tensors):
            if tensor.name == _ROPE_FACTORS:
                continue
            name = self._hf_name(tensor.name)
            heads = None
            if permutes and ".q_proj." in name:
                heads = self.config.num_heads
            elif permutes and ".k_proj." in name:
                heads = self.config.num_kv_heads
            stored = tensor.tensor_type.name
            self._check_type(tensor.name, stored, tensor.tensor_type)
            yield TensorInfo(name, _STORED_AS_IS.get(stored, "F32"), _shape(tensor), index, heads)

    def _check_type(self, tensor_name: str, stored: str, tensor_type: Any) -> None:
        # _type_traits is the package's only list of what it can dequantise.
        if stored not in _STORED_AS_IS and tensor_type not in _type_traits:
            raise self._keys.error(
                f"tensor {tensor_name} has type {stored}, which is not supported", "use another file"
            )

    def _hf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP_LEVEL:
            return f"{_TOP_LEVEL[stem]}.{suffix}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match is None or match.group(2) not in self._layer_names or suffix not in ("weight", "bias"):
            raise self._keys.error(f"tensor {name} does not belong to a Llama-family decoder")
        if suffix == "bias" and not self._has_bias(match.group(2)):
            raise self._keys.error(f"tensor {name}: this bias is not built")
        return f"model.layers.{match.group(1)}.{self._layer_names[match.group(2)]}.{suffix}"

    def _has_bias(self, part: str) -> bool:
        """Whether the decoder adds a bias there: all that it does not would be ignored."""
        config = self.config
        flags = {"attn_output": config.attention_output_bias}
        flags |= dict.fromkeys(("attn_q", "attn_k", "attn_v"), config.attention_bias)
        flags |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), config.mlp_bias)
        return flags.get(part, False)


def _shape(tensor: Any) -> tuple[int, ...]:
    """Sizes, outermost first; GGUF has them the other way round."""
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


class FastReader(GGUFReader):
    """Reads arrays in one sweep: the package's reader makes two mapped views per element, seconds for a vocabulary."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        scalar = self.gguf_scalar_to_np.get(item_type)
        if scalar is not None:
            values = self._get(start, scalar, count)
            return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, item_type]
        if item_type != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        view, offset, parts = self.data.data, start, []
        for _ in range(count):
            begin = offset + 8
            offset = begin + int.from_bytes(view[offset:begin], "little")
            if offset > len(view):
                raise ValueError("a string array ends beyond the file")
            parts.append(np.frombuffer(view[begin:offset], np.uint8))
        return offset - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, item_type]


def _open(path: Path) -> Any:
    """Map the file, turning every way a bad file can fail into one line."""
    try:
        return FastReader(path)
    except OSError as error:
        raise ModelError(f"model file {path}: can't read it: {error}: check its permissions") from error
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise ModelError(f"model file {path}: truncated or damaged ({error}): download it again") from error


def unpermute(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from interleaved pairs (0, d/2, 1, d/2+1, ...) back to two halves; any trailing shape."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
