"""The core process's configuration: one frozen record, checked where it is made.

Imports neither torch nor HTTP: the API process builds it, the core process reads it.
"""

from __future__ import annotations

from typing import Literal

from paceline_engine.records import Struct

DEVICES = ("auto", "cpu", "cuda", "simulated")
DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8", "int8")
CPU_KERNELS = ("auto", "native", "torch")
QUANTIZATIONS = ("none", "int8", "int4")
DRAFT_QUANTIZATIONS = ("auto", *QUANTIZATIONS)
PREFIX_INDEXES = ("hash", "radix")
BATCHING = ("static", "dynamic", "continuous")
SCHEDULING_POLICIES = ("fcfs", "priority")
SPECULATIVE_METHODS = ("none", "ngram", "draft", "selfDraft")
MAX_GUESSES = 32
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1}
MIB = 1024 * 1024
# A node server lets nobody hold chunks for longer.
MAX_LEASE_SECONDS = 600.0
# Of a device that isn't a GPU, where nothing else is asked for.
KV_CACHE_BYTES = 256 * MIB
_CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
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

    model_dir: converted model folder. device: auto is a GPU that can run our kernels, else the CPU. dtype: of weights,
    activations and KV; auto is bfloat16 on a GPU and float32 elsewhere. kv_cache_dtype: of KV, 8 bits on GPUs only.
    tensor_parallel_size: GPUs that the model is spread over. max_model_len: prompt plus output in tokens; None is what
    the model and the KV cache allow. max_num_seqs: running requests. max_num_batched_tokens: tokens of a step.
    prefill_chunk_tokens: one request's share of a step. block_size: tokens of a KV block. kv_cache_bytes: the block
    pool of each device; None is what gpu_memory_utilization, a share of a GPU's memory, leaves beside weights and
    activations, and KV_CACHE_BYTES elsewhere. enforce_eager: no CUDA graphs. kv_store_bytes: memory for preempted
    sequences' KV; 0 recomputes it, as the simulated device, which holds no KV, always does. kv_store: settings, as
    JSON, of the store where prefixes' KV outlives the device, "" for none. kv_warm_up_s: seconds that loading what is
    most valuable of it may take before the engine is ready; 0 loads nothing. kv_handoff_lease_s: seconds that KV is
    lent to the engine that goes on with a prompt. max_num_waiting: queued requests.
    enable_prefix_caching: share KV of equal prefixes; prefix_index: how it is looked up. batching: when a place is
    refilled; batch_wait_ms: how long a dynamic batch may take to fill. scheduling_policy: what requests are ordered by.
    max_preemptions: how often one may lose its blocks; 0 reserves the longest length of each.
    speculative_method: who guesses tokens ahead; speculative_num_tokens: guesses a step, None adapts;
    speculative_traffic_classes: (class, on) where it isn't on. speculative_model: folder of the converted draft model;
    speculative_quantization: of the drafter's weights, auto is int4 for selfDraft with all layers where it can be had;
    speculative_layers: how many of the model's draft for it, None is all where the drafter's weights are quantized,
    else two thirds; speculative_lenience: 1 is exact, below more guesses are kept and outputs no longer follow the
    model. num_scheduler_steps: most steps of a round trip to the device while all requests only decode.
    async_scheduling: plan the next step while the device makes the last; None does so on a GPU. max_loras,
    max_lora_rank: LoRA adapters loaded at once, and the highest rank of one. seed: of the simulated device's tokens,
    whose step takes simulated_alpha_ms + simulated_beta_ms * tokens. cpu_kernels: compiled, torch's, or compiled where
    they can be had. quantization: of the weights, lossy. native_dir: cache folder of the compiled kernels; "" is the
    default cache.
    """

    model_dir: str
    device: Literal["auto", "cpu", "cuda", "simulated"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    prefill_chunk_tokens: int = 256
    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_store_bytes: int = 256 * MIB
    kv_store: str = ""
    kv_warm_up_s: float = 0.0
    kv_handoff_lease_s: float = 60.0
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
    async_scheduling: bool | None = None
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
            "tensor_parallel_size",
            "max_num_waiting",
            "num_scheduler_steps",
            "max_loras",
            "max_lora_rank",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ValueError(f"kv_cache_bytes must be at least 1, not {self.kv_cache_bytes}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}")
        for name in ("kv_store_bytes", "simulated_alpha_ms", "simulated_beta_ms", "batch_wait_ms", "max_preemptions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.kv_store and not self.enable_prefix_caching:
            raise ValueError("a KV store needs enable_prefix_caching: KV comes back through that cache")
        if not 0.0 < self.kv_handoff_lease_s <= MAX_LEASE_SECONDS:
            raise ValueError(
                f"kv_handoff_lease_s must be above 0 and at most {MAX_LEASE_SECONDS:g}, not {self.kv_handoff_lease_s:g}"
            )
        if self.kv_warm_up_s < 0.0:
            raise ValueError(f"kv_warm_up_s must not be negative, not {self.kv_warm_up_s:g}")
        if self.kv_warm_up_s and (not self.kv_store or self.prefix_index != "hash"):
            raise ValueError("kv_warm_up_s needs a KV store and prefix_index hash: tokens of stored KV aren't known")
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
    def compute_dtype(self) -> str:
        """Type of weights and activations; of a device that has been settled."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def kv_dtype(self) -> str:
        """Type of KV."""
        return self.compute_dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def weights_dtype(self) -> str:
        """Precision of the weights and of what is computed with them, as it enters the identity of KV."""
        return self.compute_dtype if self.quantization == "none" else f"{self.compute_dtype}+{self.quantization}"
