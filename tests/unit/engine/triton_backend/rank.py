"""A model over several processes: `python rank.py FOLDER`; each of four ranks writes the logits it saw to FOLDER.

FOLDER holds each case's checkpoint. The ranks run one case together, then each pair its own. They are forks of one
process, since importing torch takes longer than all cases.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from tiny_models import MAX_MODEL_LEN, Sequences, make_config

from paceline_engine.backends.triton.decoder import TritonDecoder
from paceline_engine.backends.triton.parallel import TensorParallel
from paceline_engine.models.lora_files import LoraError

# Case: what the configuration changes, the matrices' format, and the ranks.
CASES: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    # Fewer KV heads than ranks, biases that must count once, and a vocabulary that four don't divide.
    "four": (
        {
            "num_heads": 8,
            "num_kv_heads": 2,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
        },
        "none",
        (0, 1, 2, 3),
    ),
    "tied": (
        {
            "num_heads": 4,
            "num_kv_heads": 2,
            "tie_word_embeddings": True,
            "norm_offset": 1.0,
            "hidden_act": "gelu_tanh",
            "embedding_scale": 7.0,
            "post_norms": True,
            "qk_norm": True,
            "logit_softcap": 3.0,
        },
        "none",
        (0, 1),
    ),
    "int4": ({"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128}, "int4", (2, 3)),
}
# Each process takes its time, so there are no more steps than needed: a prefill, a chunk, a decode.
SCHEDULE = (((1, 7), (0, 3)), ((0, 2), (1, 1)))


def run(parallel: TensorParallel, name: str, folder: Path) -> dict[str, Any]:
    """One case: its logits, sequence by sequence, and what LoRA says."""
    changes, quantization, _ = CASES[name]
    config = make_config(**changes)
    decoder = TritonDecoder(
        config,
        [folder / name / "model.safetensors"],
        device=torch.device("cpu"),
        max_model_len=MAX_MODEL_LEN,
        dtype=torch.float32,
        quantization=quantization,
        parallel=parallel,
    )
    sequences = Sequences(config, num_kv_heads=parallel.kv_heads_per_rank(config))
    sequences.run(lambda batch: decoder.forward(batch, sequences.kv), SCHEDULE)
    try:
        decoder.adapters.load("any", folder)
    except LoraError as error:
        refused = str(error)
    return {
        "kv": tuple(sequences.kv.tensor.shape),
        "refused": refused,
        "tokens": [member.tokens for member in sequences.members[:2]],
        "logits": [sequences.logits(index) for index in (0, 1)],
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    everyone = TensorParallel.connect(
        rank, 4, address=f"file://{folder}/meet", device=torch.device("cpu"), timeout=timedelta(seconds=60)
    )
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3))}
    for name, (_, _, ranks) in CASES.items():
        if rank in ranks:
            parallel = everyone if len(ranks) == 4 else TensorParallel(ranks.index(rank), 2, pairs[ranks])
            torch.save(run(parallel, name, folder), folder / f"{name}-{rank}.pt")
    everyone.close()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, Path(sys.argv[1]))) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(int(any(process.exitcode for process in ranks)))
