"""Tiny random Llama-family checkpoints, the transformers reference for them, and a loop that drives the real core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # Test folders are no packages.

from greedy import TIE_MARGIN, find_ties

from paceline_engine.backends.threads import prepare_environment

prepare_environment()  # Before torch comes in, so that tests run well beside other processes.

import torch  # noqa: E402
from oracle import embedding, greedy  # noqa: E402
from tiny_grammars import EOS, Compiler  # noqa: E402

from paceline_engine.backends.cpu_model import TorchModel  # noqa: E402
from paceline_engine.core.block_pool import BlockPool  # noqa: E402
from paceline_engine.core.kv_manager import KVManager, SequenceStore  # noqa: E402
from paceline_engine.core.prefix_cache import PrefixCache  # noqa: E402
from paceline_engine.core.scheduler import Scheduler, SchedulerConfig  # noqa: E402
from paceline_engine.core.spec import SpeculationConfig  # noqa: E402
from paceline_engine.core_grammars import Constraint  # noqa: E402
from paceline_engine.drafting import DraftModel, num_scratch_blocks  # noqa: E402
from paceline_engine.messages import AddRequest, RequestOutput, SamplingParams, TokenLogprobs  # noqa: E402
from paceline_engine.models.config import ModelConfig  # noqa: E402
from paceline_engine.models.decoder import Decoder  # noqa: E402
from paceline_engine.models.hf_folder import read_config  # noqa: E402
from paceline_engine.paged_kv import PagedKV  # noqa: E402
from paceline_engine.runner import ModelRunner  # noqa: E402

TIE_PROPERTY = "greedy tie"
BLOCK_SIZE = 4
MAX_MODEL_LEN = 96


@dataclass
class Checkpoint:
    """A model in both worlds: our config and files, and transformers' model."""

    config: ModelConfig
    files: list[Path]
    reference: Any

    def reference_tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy continuation by transformers, with its own cache."""
        return greedy(self.reference, prompt, count)

    def reference_gap(self, prefix: Sequence[int], token_id: int) -> float:
        """By how much transformers' likeliest next token is ahead of this one, in logits."""
        with torch.inference_mode():
            logits = self.reference(input_ids=torch.tensor([list(prefix)])).logits[0, -1].float()
        return float(logits.max() - logits[token_id])

    def reference_embedding(self, prompt: Sequence[int]) -> torch.Tensor:
        """transformers' last hidden state, behind the final norm, as a unit vector."""
        return embedding(self.reference, prompt)


@dataclass
class Loop:
    """Scheduler and runner, stepped to the end with every invariant checked after each step."""

    scheduler: Scheduler
    runner: ModelRunner
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, RequestOutput] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    before_step: Callable[[], None] = lambda: None
    grammar_ids: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        constraint: Constraint | None = None,
        embed: bool = False,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        grammar_id = None
        if constraint is not None and constraint.key not in self.grammar_ids:
            self.runner._grammars.load(len(self.grammar_ids), constraint.grammar, lambda num_bytes, error: None)
            self.grammar_ids[constraint.key] = len(self.grammar_ids)
        if constraint is not None:
            grammar_id = self.grammar_ids[constraint.key]
        message = AddRequest(
            request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params, grammar_id=grammar_id, embed=embed
        )
        refused = self.scheduler.add(message)
        if refused is not None:
            self._record(refused)

    def embedding(self, request_id: str) -> torch.Tensor:
        """What a finished request for an embedding came to."""
        return torch.frombuffer(bytearray(self.finished[request_id].embedding), dtype=torch.float32)

    def _record(self, output: RequestOutput) -> None:
        assert output.request_id not in self.finished, "an output after the terminal one"
        self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
        if output.prompt_logprobs:
            assert output.request_id not in self.prompt_logprobs, "prompt logprobs come once"
            self.prompt_logprobs[output.request_id] = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finished[output.request_id] = output

    def step(self) -> None:
        self.before_step()
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        for output in self.scheduler.update(plan, self.runner.execute(plan)):
            self._record(output)
        self.scheduler.check_integrity()

    def run(self, max_steps: int = 2000) -> dict[str, list[int]]:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                pool = self.scheduler.kv.pool
                assert pool.num_free_blocks == pool.num_blocks
                return self.tokens
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")


def make_loop(
    checkpoint: Checkpoint,
    *,
    num_blocks: int = 256,
    block_size: int = BLOCK_SIZE,
    max_num_seqs: int = 40,
    max_num_batched_tokens: int = 64,
    prefill_chunk_tokens: int = 16,
    max_model_len: int = MAX_MODEL_LEN,
    order: Sequence[int] | None = None,
    make_store: Callable[[PagedKV], SequenceStore] | None = None,
    dtype: torch.dtype = torch.float32,
    speculation: SpeculationConfig | None = None,
    draft: Checkpoint | int | None = None,
    make_decoder: Callable[..., Any] | None = None,
    num_scheduler_steps: int = 1,
    cached: bool = False,
    **runner_options: Any,
) -> Loop:
    """The real scheduler, runner and decoder over one pool. draft: another model, or the layers that draft for all."""
    scratch = 0 if draft is None else num_scratch_blocks(max_num_seqs, block_size)
    kv = PagedKV(checkpoint.config, num_blocks + scratch, block_size, dtype)
    make_decoder = make_decoder or partial(Decoder, dtype=dtype)
    decoder = make_decoder(checkpoint.config, checkpoint.files, max_model_len=max_model_len)
    if isinstance(decoder, Decoder):
        decoder = TorchModel(decoder)
    draft_model = None
    if isinstance(draft, int):
        draft_model = DraftModel(decoder=decoder.first_layers(draft), kv=kv, shares_kv=True)
    elif draft is not None:
        draft_model = DraftModel(
            decoder=TorchModel(Decoder(draft.config, draft.files, max_model_len=max_model_len, dtype=dtype)),
            kv=PagedKV(draft.config, num_blocks + scratch, block_size, dtype),
            shares_kv=False,
        )
    runner = ModelRunner(
        decoder,
        kv,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        draft_model=draft_model,
        num_blocks=num_blocks,
        **runner_options,
    )
    pool = BlockPool(num_blocks, order)
    cache = PrefixCache(pool, block_size) if cached else None
    manager = KVManager(pool, block_size, make_store(kv) if make_store else None, cache)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
        max_model_len=max_model_len,
        num_scheduler_steps=num_scheduler_steps,
    )
    return Loop(Scheduler(config, manager, checkpoint.config.eos_token_ids, speculation), runner)


def random_prompts(count: int, vocab_size: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


GEOMETRIES: dict[str, dict[str, Any]] = {
    "gqa-tied": {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mha-untied": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mqa-wide-heads": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3-qk-norm": {"model_type": "qwen3", "head_dim": 16},
}


def build_checkpoint(folder: Path, geometry: dict[str, Any]) -> Checkpoint:
    """A random checkpoint saved by transformers and read back by our loader; `geometry` overrides its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {
        "model_type": "llama",
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        # Large enough that tokens differ from step to step; the default's logits are nearly flat.
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **geometry,
    }
    torch.manual_seed(1234)
    hf_config = AutoConfig.for_model(**options)
    # Soft caps are computed by the eager attention alone.
    reference = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    reference.save_pretrained(folder)
    return Checkpoint(read_config(folder), sorted(folder.glob("*.safetensors")), reference)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Checkpoints by geometry name, each built once a session."""
    built: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in built:
            built[name] = build_checkpoint(tmp_path_factory.mktemp(name), GEOMETRIES[name])
        return built[name]

    return get


@pytest.fixture(scope="session")
def tiny(checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    """The grouped-query, tied-embedding model: the geometry of SmolLM2 in small."""
    return checkpoints("gqa-tied")


@pytest.fixture(scope="session")
def ending(tiny: Checkpoint) -> Checkpoint:
    """The tiny model with two ending tokens."""
    return replace(tiny, config=replace(tiny.config, eos_token_ids=EOS))


@pytest.fixture(scope="session")
def compiler(tiny: Checkpoint) -> Compiler:
    """Grammars over the tiny model's tokens."""
    return Compiler(tiny.config.vocab_size)


@pytest.fixture(scope="session")
def new_loop() -> Callable[..., Loop]:
    """`make_loop`, as a fixture because test folders are no packages."""
    return make_loop


@pytest.fixture(scope="session")
def prompts_for() -> Callable[..., list[list[int]]]:
    """`random_prompts`."""
    return random_prompts


@pytest.fixture
def equals_greedy(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`find_ties` of (checkpoint, prompts, ours, expected), each tie noted beside the test for the summary."""

    def check(*arguments: Any) -> None:
        for tie in find_ties(*arguments):
            record_property(TIE_PROPERTY, str(tie))

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the ties of all tests apart from their outcomes."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    ties = [
        f"{report.nodeid}: {value}"
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == TIE_PROPERTY
    ]
    if ties:
        terminalreporter.section(f"{len(ties)} greedy ties with transformers, margin {TIE_MARGIN:g}")
        for line in ties:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def make_checkpoint() -> type[Checkpoint]:
    """`Checkpoint`."""
    return Checkpoint


@pytest.fixture(scope="session")
def build() -> Callable[[Path, dict[str, Any]], Checkpoint]:
    """`build_checkpoint`."""
    return build_checkpoint
