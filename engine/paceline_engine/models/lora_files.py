"""Reads a LoRA adapter folder as PEFT writes it: adapter_config.json beside adapter_model.safetensors.

Only what the decoder adds exactly is accepted: low-rank pairs on its seven projections (Hu et al., arXiv 2106.09685;
rank-stabilised scale: arXiv 2312.03732). Anything else, such as DoRA, trained biases or whole retrained layers, is
refused by name. The digest covers both files, so an adapter of the same name and other content is another adapter. No
torch, no peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
# Settings that change the numbers in a way that isn't built, and the values under which they don't.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
_PAIR = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(\w+)\.(\w+))\.lora_([AB])\.weight")


class LoraError(ValueError):
    """An adapter can't be used: one line that says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the weights file: half ("A" or "B") of the pair on a layer's projection."""

    name: str
    layer: int
    projection: str
    half: str
    shape: tuple[int, ...]


class AdapterFolder:
    """An adapter's configuration and the names of its tensors, checked. Raises LoraError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights_file = path / WEIGHTS
        self._config = self._read_config()
        header = self._read_header()
        self.tensors = tuple(self._entries(header))
        if not self.tensors:
            raise self.error(f"{WEIGHTS} holds no low-rank pair", "train it on the attention or MLP projections")

    def error(self, what: str, remedy: str) -> LoraError:
        """A refusal of this folder."""
        return LoraError(f"adapter {self.path}: {what}: {remedy}")

    def digest(self) -> str:
        """Hex BLAKE2b-256 of both files' content."""
        digest = blake2b(digest_size=32, person=b"paceline-adapter")
        for name in (CONFIG, WEIGHTS):
            with (self.path / name).open("rb") as file:
                content = blake2b(digest_size=32)
                while block := file.read(1 << 20):
                    content.update(block)
            digest.update(content.digest())
        return digest.hexdigest()

    def scale(self, module: str, rank: int) -> float:
        """What the pair's product is multiplied by: alpha / r, or alpha / sqrt(r) if rank-stabilised.

        Patterns give single modules an alpha or a rank of their own; the first that matches the end of the name holds.
        """
        wanted = self._pattern("rank_pattern", module, self._config.get("r"))
        if wanted != rank:
            raise self.error(f"{module} has rank {rank}, {CONFIG} says {wanted}", "save the adapter again")
        alpha = self._pattern("alpha_pattern", module, self._config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise self.error(f"{CONFIG} gives {module} the alpha {alpha!r}", "it must be a number")
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _pattern(self, name: str, module: str, default: Any) -> Any:
        patterns: Mapping[str, Any] = self._config.get(name) or {}
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise self.error(f"{CONFIG} {name} {pattern!r} is no pattern ({error})", "save it again") from error
        return default

    def _read_config(self) -> dict[str, Any]:
        try:
            config = json.loads((self.path / CONFIG).read_bytes())
        except (OSError, ValueError) as error:
            raise self.error(f"can't read {CONFIG} ({error})", "name a folder that PEFT saved") from error
        if not isinstance(config, dict):
            raise self.error(f"{CONFIG} is not a JSON object", "name a folder that PEFT saved")
        for name, neutral in _NEUTRAL.items():
            if config.get(name) not in neutral:
                raise self.error(f"{name} {config.get(name)!r} is not built", f"it must be {neutral[0]!r}")
        return config

    def _read_header(self) -> dict[str, Any]:
        """The weights file's header, and a check that the file is as long as it says."""
        try:
            size = self.weights_file.stat().st_size
            with self.weights_file.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_size)) if 0 < header_size < size else None
        except (OSError, ValueError) as error:
            raise self.error(f"can't read {WEIGHTS} ({error})", "name a folder that PEFT saved") from error
        if not isinstance(header, dict):
            raise self.error(f"{WEIGHTS} is not a safetensors file", "complete the download")
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + header_size + end != size:
            raise self.error(f"{WEIGHTS} is truncated or damaged ({size} bytes)", "complete the download")
        return header

    def _entries(self, header: Mapping[str, Any]) -> Iterator[TensorEntry]:
        for name, entry in header.items():
            match = _PAIR.fullmatch(name)
            if match is None or match[4] not in PROJECTIONS.get(match[3], ()):
                known = ", ".join(projection for names in PROJECTIONS.values() for projection in names)
                raise self.error(f"tensor {name!r} is not a low-rank pair that is built", f"target only {known}")
            yield TensorEntry(name, int(match[2]), match[4], match[5], tuple(entry["shape"]))
