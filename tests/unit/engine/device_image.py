"""Run as a program: imports the engine core with only what a GPU image has, generates, and prints the tokens as JSON.

    python device_image.py FOLDER [--all-packages]

FOLDER is for the weights of a tiny random model, which are the same each time. With --all-packages nothing is hidden.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

# What the engine's own code may use there; what these need comes with them.
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "xxhash", "nvidia-ml-py")
PACKAGES += ("prometheus-client", "rich", "pytest", "hypothesis", "psutil")
# Not there, though a newer version of something above may need one.
ABSENT = {"msgspec", "pyzmq", "fastapi", "uvicorn", "pydantic", "pydantic-core", "xgrammar", "gguf", "kopf"}
FOLDERS = ("core", "sampling", "kernels", "backends")
MODULES = ("messages", "config", "runner", "batch", "drafting", "core_loop", "core_commands", "kv_transfer", "metrics")
MODULES += tuple(f"models.{name}" for name in ("decoder", "layers", "weights", "config", "hf_config", "rope", "lora"))


def with_needs(names: Iterable[str]) -> set[str]:
    """Installed distributions of these names and everything they need, names in PyPI's normal form."""
    found: set[str] = set()
    left = [re.sub(r"[-_.]+", "-", name).lower() for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        found.add(name)
        left += [re.split(r"[^\w.-]", need)[0].lower().replace("_", "-") for need in needs if "extra ==" not in need]
    return found


def hide_other_packages() -> None:
    """Have only the standard library, Paceline and PACKAGES importable: others aren't found, as if not installed."""
    allowed = with_needs(PACKAGES) - ABSENT
    hidden = {
        module
        for module, names in packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in names} & (allowed | {"paceline"})
    }

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            return None if fullname.partition(".")[0] in hidden else PathFinder.find_spec(fullname, path, target)

    assert {"msgspec", "zmq", "pydantic", "fastapi", "xgrammar", "gguf"} <= hidden
    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder


def import_core() -> None:
    """Every module of the engine core."""
    names = [f"paceline_engine.{name}" for name in MODULES]
    for folder in FOLDERS:
        package = importlib.import_module(f"paceline_engine.{folder}")
        names += [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in names:
        importlib.import_module(name)


def make_decoder(folder: Path) -> Any:
    """torch's decoder of a tiny random model."""
    import torch
    from safetensors.torch import save_file

    from paceline_engine.models.config import ModelConfig
    from paceline_engine.models.decoder import Decoder

    torch.manual_seed(0)
    hidden, inner, vocab, layers = 32, 64, 97, 2
    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    for index in range(layers):
        prefix = f"model.layers.{index}."
        shapes = {"q_proj": (32, hidden), "k_proj": (16, hidden), "v_proj": (16, hidden), "o_proj": (hidden, 32)}
        tensors |= {f"{prefix}self_attn.{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        tensors |= {f"{prefix}mlp.{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    return Decoder(config, [folder / "model.safetensors"], max_model_len=64, dtype=torch.float32)


def generate(folder: Path) -> dict[str, list[int]]:
    """Tokens by request, of some that are greedy and one that isn't, through scheduler, runner and decoder."""
    import torch

    from paceline_engine.backends.cpu_model import TorchModel
    from paceline_engine.core.block_pool import BlockPool
    from paceline_engine.core.kv_manager import KVManager
    from paceline_engine.core.prefix_cache import PrefixCache
    from paceline_engine.core.scheduler import Scheduler, SchedulerConfig
    from paceline_engine.core.spec import SpeculationConfig
    from paceline_engine.messages import AddRequest, SamplingParams
    from paceline_engine.paged_kv import PagedKV
    from paceline_engine.runner import ModelRunner

    decoder = make_decoder(folder)
    runner = ModelRunner(
        TorchModel(decoder), PagedKV(decoder.config, 64, 4, torch.float32), max_num_seqs=8, max_model_len=64
    )
    pool = BlockPool(64)
    sizes = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, prefill_chunk_tokens=8, max_model_len=64)
    guessing = SpeculationConfig(method="ngram", num_tokens=2)
    scheduler = Scheduler(sizes, KVManager(pool, 4, cache=PrefixCache(pool, 4)), (), guessing)
    for number, temperature in enumerate((0.0, 0.0, 0.9)):
        sampling = SamplingParams(max_tokens=6, temperature=temperature, seed=7, logprobs=1)
        prompt = tuple(range(1 + number, 20 + 2 * number))
        scheduler.add(AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    tokens: dict[str, list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        for output in scheduler.update(plan, runner.execute(plan)):
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def main() -> None:
    """See the module."""
    folder, *options = sys.argv[1:]
    if options != ["--all-packages"]:
        hide_other_packages()
        import_core()
    from paceline_engine.records import PlainStruct, Struct

    assert issubclass(Struct, PlainStruct) == (options == [])
    sys.stdout.write(json.dumps(generate(Path(folder))))


if __name__ == "__main__":
    main()
