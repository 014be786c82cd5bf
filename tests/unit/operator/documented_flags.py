"""Names of flags and variables that other engines' own documentation lists, as far as Paceline could set them.

Taken by name from: vLLM 0.33.0 (vllm/engine/arg_utils.py and vllm/entrypoints/common/cli_args.py of the source
distribution), SGLang 0.5.23 (sglang/srt/arg_groups/fields of the wheel), llama.cpp's llama-server 0.6.0 (--help),
TensorRT-LLM 1.2 (tensorrt_llm/commands/serve.py), Triton 26.01 (python/openai/openai_frontend/main.py), Ollama 0.13
(its FAQ and envconfig/config.go), NIM for LLMs 2.0 (its environment variables; arguments are vLLM's).
"""

from __future__ import annotations

_VLLM = frozenset(
    {
        "--api-key", "--block-size", "--chat-template", "--download-dir", "--dtype", "--enable-prefix-caching",
        "--gpu-memory-utilization", "--host", "--kv-cache-dtype", "--kv-cache-memory-bytes", "--load-format",
        "--long-prefill-token-threshold", "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs",
        "--no-enable-prefix-caching", "--port", "--quantization", "--revision", "--served-model-name",
        "--shutdown-timeout", "--speculative-config", "--tensor-parallel-size", "--tokenizer-revision",
    }
)  # fmt: skip
_SGLANG = frozenset(
    {
        "--api-key", "--chat-template", "--chunked-prefill-size", "--context-length", "--disable-radix-cache",
        "--download-dir", "--enable-metrics", "--host", "--kv-cache-dtype", "--load-format", "--max-prefill-tokens",
        "--max-running-requests", "--max-total-tokens", "--mem-fraction-static", "--model-path", "--page-size",
        "--port", "--quantization", "--revision", "--served-model-name", "--speculative-algorithm",
        "--speculative-draft-model-path", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
        "--speculative-num-steps", "--tensor-parallel-size", "--tp-size",
    }
)  # fmt: skip
_LLAMACPP = frozenset(
    {
        "--alias", "--api-key", "--api-key-file", "--batch-size", "--cache-prompt", "--cache-type-k", "--cache-type-v",
        "--chat-template-file", "--ctx-size", "--flash-attn", "--hf-file", "--hf-repo", "--host", "--jinja",
        "--metrics", "--model", "--no-cache-prompt", "--no-slots", "--parallel", "--port", "--slots",
        "--spec-draft-model", "--spec-draft-n-max", "--spec-ngram-simple-size-m", "--spec-type", "--threads",
        "--ubatch-size",
    }
)  # fmt: skip
_TRTLLM = frozenset(
    {
        "--backend", "--chat_template", "--enable_chunked_prefill", "--free_gpu_memory_fraction", "--host",
        "--max_batch_size", "--max_num_tokens", "--max_seq_len", "--port", "--revision", "--tensor_parallel_size",
        "--tokenizer", "--tp_size",
    }
)  # fmt: skip
_TRITON = frozenset({"--backend", "--host", "--model-repository", "--openai-port", "--tokenizer"})
_OLLAMA = frozenset(
    {
        "OLLAMA_CONTEXT_LENGTH", "OLLAMA_FLASH_ATTENTION", "OLLAMA_HOST", "OLLAMA_KEEP_ALIVE", "OLLAMA_KV_CACHE_TYPE",
        "OLLAMA_MAX_LOADED_MODELS", "OLLAMA_MAX_QUEUE", "OLLAMA_MODELS", "OLLAMA_NUM_PARALLEL",
    }
)  # fmt: skip
_NIM = frozenset({"NIM_CACHE_PATH", "NIM_LOG_LEVEL", "NIM_MODEL_PATH", "NIM_MODEL_PROFILE", "NIM_SERVER_PORT"})

DOCUMENTED: dict[str, tuple[str, frozenset[str]]] = {
    "vllm": ("0.33.0", _VLLM),
    "sglang": ("0.5.23", _SGLANG),
    "llamacpp": ("0.6.0", _LLAMACPP),
    "ollama": ("0.13.0", _OLLAMA),
    "trtllm": ("1.2.0", _TRTLLM),
    "tritonserver": ("26.01", _TRITON),
    "nim": ("2.0", _NIM | _VLLM),
    "custom": ("", frozenset()),
}
"""Runtime to (release, names)."""
