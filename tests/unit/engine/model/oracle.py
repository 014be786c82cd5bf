"""What transformers makes of a GGUF file, computed once for each version of all that it depends on.

Loading the real model in transformers and decoding with it costs more than everything that is compared with it. The
answers are kept in `.build/oracle/`, under a key of the weights, the questions, this file's code, the packages that
compute and the kind of CPU: a change of any of them, or a new machine, asks transformers again.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[4] / ".build" / "oracle"
PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class Answers:
    """The model's configuration, a digest of each tensor in float32, continuations and embeddings of the prompts."""

    config: dict[str, Any]
    digests: dict[str, str]
    tokens: list[list[int]]
    embeddings: list[list[float]]


@dataclass(frozen=True)
class Question:
    """A GGUF file and the prompts that are to be continued by `count` tokens."""

    weights: Path
    prompts: Sequence[Sequence[int]]
    count: int

    def key(self, versions: Mapping[str, str]) -> str:
        """Digest of all that the answers depend on."""
        with self.weights.open("rb") as file:
            weights = hashlib.file_digest(file, "sha256").hexdigest()
        parts = [weights, [list(prompt) for prompt in self.prompts], self.count, dict(versions)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Of the packages, the code and the CPU that compute the answers."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return {name: metadata.version(name) for name in PACKAGES} | {"cpu": cpu, "code": code}


def answers(question: Question, folder: Path, compute: Callable[[Question], Answers] | None = None) -> Answers:
    """The recorded answers, or computed and recorded; whoever needs the same ones meanwhile waits for them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{question.key(versions())}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return Answers(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):  # None yet, or not one.
            computed = (compute or ask_transformers)(question)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(asdict(computed)))
        half.replace(path)
    return computed


def load_transformers(path: Path) -> Any:
    """transformers' model of a GGUF file, in float32."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()


def ask_transformers(question: Question) -> Answers:
    """Decode with transformers."""
    model = load_transformers(question.weights)
    return Answers(
        config=json.loads(model.config.to_json_string(use_diff=False)),
        digests={name: digest(tensor) for name, tensor in model.state_dict().items()},
        tokens=[greedy(model, prompt, question.count) for prompt in question.prompts],
        embeddings=[embedding(model, prompt).tolist() for prompt in question.prompts],
    )


def digest(tensor: torch.Tensor) -> str:
    """Of the shape and every bit of a tensor in float32."""
    values = tensor.float().contiguous()
    return hashlib.sha256(str(tuple(values.shape)).encode() + values.numpy().tobytes()).hexdigest()


def embedding(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """transformers' last hidden state, behind the final norm, as a unit vector."""
    with torch.inference_mode():
        hidden = model.get_decoder()(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(hidden.float(), dim=0)


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by transformers, with its own cache."""
    from transformers import DynamicCache

    # The argument was renamed within transformers 5.
    parameters = inspect.signature(type(model).forward).parameters
    cache = {"cache" if "cache" in parameters else "past_key_values": DynamicCache()}
    tokens: list[int] = []
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(count):
            result = model(input_ids=ids, use_cache=True, **cache)
            ids = result.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
    return tokens
