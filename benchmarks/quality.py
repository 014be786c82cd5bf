"""What each lossy precision costs in quality, on a fixed text: `python benchmarks/quality.py`.

The text, benchmarks/data/alice.txt, is the beginning of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, in the
public domain). Each precision computes the logits of every position with its own KV; the Kullback-Leibler divergence
from float32's distribution, KL(float32 || precision), is averaged over positions, in nats. Perplexity is exp of the
mean negative log-likelihood. The example model comes from a Q4_1 file, whose 4-bit weights `int4` holds exactly: its
cost here is that of 8-bit activations and head. Nothing is random or timed. Writes results/quality.json and quality.md.
"""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from report import Bar, Report, Row
from skeleton import SOURCE
from tokenizers import Tokenizer

from paceline_engine.backends.cpu_native import NativeDecoder
from paceline_engine.backends.threads import num_threads
from paceline_engine.models.loader import LoadedModel, default_cache_dir, load_model_dir, prepare_model
from paceline_engine.models.source import resolve
from paceline_engine.native.build import ensure_library
from paceline_engine.native.library import load_library

TEXT = Path(__file__).parent / "data" / "alice.txt"
WINDOW, BLOCK_SIZE = 512, 16
# Precision: weights' format and the KV's type.
PRECISIONS = {
    "float32": ("float32", torch.float32),
    "bfloat16": ("bfloat16", torch.bfloat16),
    "float32+int8": ("int8", torch.float32),
    "float32+int4": ("int4", torch.float32),
    "bfloat16+int4": ("int4", torch.bfloat16),
}
# Mean KL in nats that a precision may cost; a kernel that computes something else is far above.
KL_BOUNDS = {"bfloat16": 0.005, "float32+int8": 0.005, "float32+int4": 0.02, "bfloat16+int4": 0.02}
log = logging.getLogger("bench")


def log_probabilities(loaded: LoadedModel, ids: list[int], precision: str) -> torch.Tensor:
    """[windows * WINDOW, vocab] log-probabilities of the token after each position."""
    weights, kv_type = PRECISIONS[precision]
    config, num_blocks = loaded.config, WINDOW // BLOCK_SIZE
    decoder = NativeDecoder(
        load_library(ensure_library(default_cache_dir())),
        config,
        loaded.files,
        max_model_len=WINDOW,
        weight_format=weights,
        threads=num_threads(),
    )
    shape = (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    positions = torch.arange(WINDOW)
    rows: list[torch.Tensor] = []
    for begin in range(0, len(ids) - WINDOW, WINDOW):
        kv = SimpleNamespace(tensor=torch.zeros(shape, dtype=kv_type), num_blocks=num_blocks, block_size=BLOCK_SIZE)
        batch = SimpleNamespace(
            token_ids=torch.tensor(ids[begin : begin + WINDOW]),
            positions=positions,
            logits_rows=positions,
            slots=positions,
            sequence_begins=torch.tensor([0, WINDOW]),
            block_tables=torch.arange(num_blocks)[None],
        )
        rows.append(decoder.step(batch, kv).log_softmax(-1))  # type: ignore[arg-type]
    return torch.cat(rows)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    loaded = load_model_dir(prepare_model(resolve(SOURCE), default_cache_dir()))
    ids: list[int] = Tokenizer.from_file(str(loaded.tokenizer_file)).encode(TEXT.read_text("utf-8")).ids
    report = Report("quality")
    exact = log_probabilities(loaded, ids, "float32")
    targets = torch.tensor(ids[1 : len(exact) + 1])
    for precision in PRECISIONS:
        found = exact if precision == "float32" else log_probabilities(loaded, ids, precision)
        perplexity = math.exp(-found.gather(1, targets[:, None]).mean().item())
        divergence = (exact.exp() * (exact - found)).sum(-1).mean().item()
        report.rows.append(Row(precision, f"perplexity over {len(exact)} tokens", "", round(perplexity, 3)))
        if precision in KL_BOUNDS:
            report.rows.append(Row(precision, "mean KL from float32", "nats", round(divergence, 5)))
            bound = KL_BOUNDS[precision]
            report.bars.append(Bar(f"mean KL from float32, {precision}, nats", round(divergence, 5), "<=", bound))
        log.info("%s: perplexity %.3f, KL %.5f", precision, perplexity, divergence)
    path = report.write()
    log.info("%s", path.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
