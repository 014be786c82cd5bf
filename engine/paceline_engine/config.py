"""The core process's configuration: one frozen record, checked where it is made.

Imports neither torch nor HTTP: the API process builds it, the core process reads it.
"""

from __future__ import annotations

from typing import Literal

from paceline_engine.records import Struct

DEVICES = ("auto", "cpu", "simulated")
DTYPES = ("float32", "bfloat16")
CPU_KERNELS = ("auto", "native", "torch")
QUANTIZATIONS = ("none", "int8", "int4")
DRAFT_QUANTIZATIONS = ("auto", *QUANTIZATIONS)
PREFIX_INDEXES = ("hash", "radix")
BATCHING = ("static", "dynamic", "continuous")
SCHEDULING_POLICIES = ("fcfs", "priority")
SPECULATIVE_METHODS = ("none", "ngram", "draft", "selfDraft")
MAX_GUESSES = 32
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
MIB = 1024 * 1024
_CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "cpu_kernels": CPU_KERNELS,
    "quantization": QUANTIZATIONS,
    "speculative_quantization": DRAFT_QUANTIZATIONS,
    "prefix_index": PREFIX_INDEXES,
    "batching": BATCHING,
    "scheduling_policy": SCHEDULING_POLICIES,
    "speculative_method": SPECULATIVE_METHODS,
}


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Everything the core process needs to know.

    model_dir: converted model folder. dtype: of weights, activations and KV. max_model_len: prompt plus output in
    tokens; None is what the model and the KV cache allow. max_num_seqs: running requests. max_num_batched_tokens:
    tokens of a step. prefill_chunk_tokens: one request's share of a step. block_size: tokens of a KV block.
    kv_cache_bytes: the block pool. kv_store_bytes: memory for preempted sequences' KV; 0 recomputes it, as the
    simulated device, which holds no KV, always does. max_num_waiting: queued requests. enable_prefix_caching: share KV
    of equal prefixes; prefix_index: how it is looked up. batching: when a place is refilled; batch_wait_ms: how long a
    dynamic batch may take to fill. scheduling_policy: what requests are ordered by. max_preemptions: how often one may
    lose its blocks; 0 reserves the longest length of each. speculative_method: who guesses tokens ahead;
    speculative_num_tokens: guesses a step, None adapts; speculative_traffic_classes: (class, on) where it isn't on.
    speculative_model: folder of the converted draft model; speculative_quantization: of the drafter's weights, auto
    is int4 for selfDraft with all layers where it can be had; speculative_layers: how many of the model's draft for it,
    None is all where the drafter's weights are quantized, else two thirds;
    speculative_lenience: 1 is exact, below more guesses are kept and outputs no longer follow the model.
    num_scheduler_steps: most steps of a round trip to the device while all requests only decode.
    async_scheduling: plan the next step while the device makes the last.
    max_loras, max_lora_rank: LoRA adapters loaded at once, and the highest rank of one. seed: of the simulated device's
    tokens, whose step takes simulated_alpha_ms + simulated_beta_ms * tokens.
    cpu_kernels: compiled, torch's, or compiled where they can be had. quantization: of the weights, lossy. native_dir:
    cache folder of the compiled kernels; "" is the default cache.
    """

    model_dir: str
    device: Literal["auto", "cpu", "simulated"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    prefill_chunk_tokens: int = 256
    block_size: int = 16
    kv_cache_bytes: int = 256 * MIB
    kv_store_bytes: int = 256 * MIB
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    prefix_index: Literal["hash", "radix"] = "hash"
    batching: Literal["static", "dynamic", "continuous"] = "continuous"
    batch_wait_ms: float = 20.0
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    max_preemptions: int = 3
    speculative_method: Literal["none", "ngram", "draft", "selfDraft"] = "none"
    speculative_num_tokens: int | None = None
    speculative_traffic_classes: tuple[tuple[str, bool], ...] = ()
    speculative_model: str = ""
    speculative_layers: int | None = None
    speculative_quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    speculative_lenience: float = 1.0
    num_scheduler_steps: int = 1
    async_scheduling: bool = False
    max_loras: int = 8
    max_lora_rank: int = 64
    seed: int = 0
    simulated_alpha_ms: float = 8.0
    simulated_beta_ms: float = 0.1
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    native_dir: str = ""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk_tokens",
            "block_size",
            "kv_cache_bytes",
            "max_num_waiting",
            "num_scheduler_steps",
            "max_loras",
            "max_lora_rank",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("kv_store_bytes", "simulated_alpha_ms", "simulated_beta_ms", "batch_wait_ms", "max_preemptions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2 tokens, not {self.max_model_len}")
        if self.speculative_num_tokens is not None and not 1 <= self.speculative_num_tokens <= MAX_GUESSES:
            raise ValueError(f"speculative_num_tokens must be 1 to {MAX_GUESSES}, not {self.speculative_num_tokens}")
        if not 0.0 < self.speculative_lenience <= 1.0:
            raise ValueError(f"speculative_lenience must be above 0 and at most 1, not {self.speculative_lenience}")
        # The simulated device knows its own next tokens.
        if self.device != "simulated" and (self.speculative_method == "draft") != bool(self.speculative_model):
            raise ValueError("speculative_method draft and speculative_model need each other")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one weight, activation or KV element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def weights_dtype(self) -> str:
        """Precision of the weights and of what is computed with them, as it enters the identity of KV."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}+{self.quantization}"
