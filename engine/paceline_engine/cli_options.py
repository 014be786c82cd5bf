"""The options of `paceline-engine`, each with its unit, bounds and help. Light: no model, HTTP or torch import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from paceline_api.quantity import parse_bytes, parse_duration_s
from paceline_engine.config import (
    BATCHING,
    CPU_KERNELS,
    DEVICES,
    DRAFT_QUANTIZATIONS,
    DTYPES,
    KV_CACHE_DTYPES,
    MAX_GUESSES,
    PREFIX_INDEXES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    SPECULATIVE_METHODS,
)

T = TypeVar("T")


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A typer parser whose complaint is the function's own."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return convert


def _choice(*allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return _parsed(check)


def _num_guesses(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= MAX_GUESSES):
        raise ValueError(f"{text!r} is neither auto nor a number from 1 to {MAX_GUESSES}")
    return text


def num_guesses(text: str) -> int | None:
    """What --speculative-num-tokens means to the core: None adapts."""
    return None if text == "auto" else int(text)


def traffic_classes(texts: list[str] | None) -> tuple[tuple[str, bool], ...]:
    """CLASS=on|off, parsed. Raises typer.BadParameter that names the option."""
    classes: list[tuple[str, bool]] = []
    for text in texts or ():
        name, _, switch = text.rpartition("=")
        if switch not in ("on", "off"):
            raise typer.BadParameter(f"--speculative-traffic-class {text!r} isn't CLASS=on or CLASS=off")
        classes.append((name, switch == "on"))
    return tuple(classes)


_SIZE, _DURATION = _parsed(parse_bytes), _parsed(parse_duration_s)
_TOOL_FORMATS = ("auto", "none", "hermes", "llama3_json")
_LEVELS = ("debug", "info", "warning", "error")

Model = Annotated[
    str, typer.Option(help="package://NAME/FILE.gguf, file:///PATH, hf://ORG/NAME or s3://BUCKET/PREFIX.")
]
ServedModelName = Annotated[str, typer.Option(help="Name that requests use. Default: the model's file name.")]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where converted models are kept. Default: $PACELINE_CACHE_DIR or the user's cache folder."),
]
NativeDir = Annotated[
    Path | None,
    typer.Option(help="Folder to compile into, for $PACELINE_NATIVE_DIR. Default: the Python environment."),
]
CacheLimit = Annotated[
    int, typer.Option(parser=_SIZE, metavar="SIZE", help="Most bytes of cached models; unused ones make room.")
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the bearer token that /v1/* and /admin/* ask for. Default: none asked.")
]
StepLogFile = Annotated[Path, typer.Argument(help="File with a step log.")]
TemplateFile = Annotated[Path | None, typer.Option(help="Jinja file to use instead of the model's chat template.")]
TrustTemplate = Annotated[
    bool, typer.Option("--trust-request-chat-template", help="Let requests bring a chat_template of their own.")
]
ToolCallParser = Annotated[
    str,
    typer.Option(
        parser=_choice(*_TOOL_FORMATS),
        metavar="|".join(_TOOL_FORMATS),
        help="Format of the model's tool calls, by vLLM's names; auto: by the chat template; none refuses tools.",
    ),
]
EnableAutoToolChoice = Annotated[
    bool,
    typer.Option(
        "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
        help="Let the model decide whether to call a tool. Off, a request must ask for a call by tool_choice.",
    ),
]
GrammarTimeout = Annotated[
    float, typer.Option(parser=_DURATION, metavar="DURATION", help="How long a constraint may take to compile.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.", envvar="PACELINE_HOST")]
EngineHost = Annotated[str, typer.Option(help="Address of the engine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Public port; 0 picks one.")]
AdminPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of /v1/load and /admin/drain.")]
EngineAdminPort = Annotated[int, typer.Option(min=1, max=65535, help="Admin port of the engine.")]
MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of /metrics.")]
Device = Annotated[
    str,
    typer.Option(
        parser=_choice(*DEVICES), metavar="|".join(DEVICES), help="Where steps run; auto is a GPU, else the CPU."
    ),
]
TensorParallelSize = Annotated[int, typer.Option(min=1, help="GPUs that the model is spread over.")]
GpuMemoryUtilization = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of a GPU's memory for weights, activations and KV together.")
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Run decode steps without CUDA graphs.")]
Dtype = Annotated[
    str,
    typer.Option(
        parser=_choice(*DTYPES),
        metavar="|".join(DTYPES),
        help="Of weights, activations and KV; auto is bfloat16 on a GPU, else float32.",
    ),
]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        parser=_choice(*KV_CACHE_DTYPES),
        metavar="|".join(KV_CACHE_DTYPES),
        help="Of KV; 8 bits, a little less exact, on a GPU only.",
    ),
]
CpuKernels = Annotated[
    str,
    typer.Option(
        parser=_choice(*CPU_KERNELS),
        metavar="|".join(CPU_KERNELS),
        help="Compiled at the first start, or torch's; auto falls back to torch's.",
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        parser=_choice(*QUANTIZATIONS),
        metavar="|".join(QUANTIZATIONS),
        help="Of weights, on the CPU: smaller and faster, a little less exact.",
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and output. Default: the model's.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Requests that run at once.")]
MaxNumWaiting = Annotated[
    int, typer.Option("--max-num-waiting", "--max-num-queued-reqs", min=0, help="Requests that may wait; more get 503.")
]
MaxNumBatchedTokens = Annotated[int, typer.Option(min=1, help="Tokens of one step.")]
PrefillChunkTokens = Annotated[int, typer.Option(min=1, help="Most prompt tokens of one request in one step.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")]
KVCacheMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        parser=_SIZE,
        metavar="SIZE",
        help="Memory of the KV block pool. Default: what --gpu-memory-utilization leaves of a GPU, else 256Mi.",
    ),
]
KVStoreMemory = Annotated[
    int, typer.Option(parser=_SIZE, metavar="SIZE", help="Memory for preempted requests' KV; 0 recomputes it.")
]
KVStoreConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON file with the settings of the store where KV of prompts outlives the GPU: memory, disk, node, s3.",
    ),
]
KVStoreDisk = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Short for a store on disk: a folder, for this engine alone, where KV of prompts outlives a restart.",
    ),
]
KVStoreDiskCapacity = Annotated[
    int | None,
    typer.Option(
        parser=_SIZE, metavar="SIZE", help="Most bytes that the files of --kv-store-disk may take. Default: 8Gi."
    ),
]
KVWarmUp = Annotated[
    float,
    typer.Option(
        parser=_DURATION, metavar="DURATION", help="Load the most valuable stored KV before ready, for so long; 0: not."
    ),
]
KVHandoffLease = Annotated[
    float,
    typer.Option(
        parser=_DURATION, metavar="DURATION", help="How long a prompt's KV is lent to the engine that goes on with it."
    ),
]
MaxLoras = Annotated[int, typer.Option(min=1, help="LoRA adapters that may be loaded at once.")]
MaxLoraRank = Annotated[int, typer.Option(min=1, help="Highest rank of a LoRA adapter.")]
DrainTimeout = Annotated[
    float, typer.Option(parser=_DURATION, metavar="DURATION", help="How long SIGTERM waits for running requests.")
]
ProgressTimeout = Annotated[
    float, typer.Option(parser=_DURATION, metavar="DURATION", help="Silence of the core after which live is 503.")
]
Timeout = Annotated[
    float, typer.Option(parser=_DURATION, metavar="DURATION", help="How long running requests may take.")
]
Batching = Annotated[
    str, typer.Option(parser=_choice(*BATCHING), metavar="|".join(BATCHING), help="When a place is refilled.")
]
BatchWaitMs = Annotated[float, typer.Option(min=0, help="Dynamic batching: milliseconds a batch may take to fill.")]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        parser=_choice(*SCHEDULING_POLICIES),
        metavar="|".join(SCHEDULING_POLICIES),
        help="Order of requests: by (priority, arrival), lower first, or by arrival alone.",
    ),
]
MaxPreemptions = Annotated[
    int, typer.Option(min=0, help="How often one request may lose its blocks; 0 reserves each one's longest length.")
]
NumSchedulerSteps = Annotated[
    int, typer.Option(min=1, help="Steps in one round trip to the device while all requests only decode.")
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Plan the next step while the device makes the last. Default: on a GPU.",
        show_default=False,
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching", help="Share KV of equal prefixes between requests."
    ),
]
PrefixIndex = Annotated[
    str,
    typer.Option(parser=_choice(*PREFIX_INDEXES), metavar="|".join(PREFIX_INDEXES), help="How prefixes are looked up."),
]
SpeculativeMethod = Annotated[
    str,
    typer.Option(
        parser=_choice(*SPECULATIVE_METHODS), metavar="|".join(SPECULATIVE_METHODS), help="Who guesses tokens ahead."
    ),
]
SpeculativeNumTokens = Annotated[
    str, typer.Option(parser=_parsed(_num_guesses), metavar="auto|N", help="Guesses a step; auto adapts.")
]
SpeculativeTrafficClass = Annotated[
    list[str] | None,
    typer.Option(metavar="CLASS=on|off", help="Whether to guess for a traffic class. May be repeated."),
]
SpeculativeModel = Annotated[
    str, typer.Option(metavar="SOURCE", help="Model that drafts, for method draft; same vocabulary.")
]
SpeculativeLayers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Layers that draft for all, with selfDraft. Default: all, of int4 weights; else two thirds."
    ),
]
SpeculativeQuantization = Annotated[
    str,
    typer.Option(
        parser=_choice(*DRAFT_QUANTIZATIONS),
        metavar="|".join(DRAFT_QUANTIZATIONS),
        help="Of the drafter's weights; exact anyway.",
    ),
]
SpeculativeLenience = Annotated[
    float,
    typer.Option(min=0, max=1, help="1 is exact. Below, more guesses stand and outputs no longer follow the model."),
]
Seed = Annotated[int, typer.Option(help="Of the simulated device's tokens.")]
SimulatedAlpha = Annotated[float, typer.Option(min=0, help="Simulated device: milliseconds of an empty step.")]
SimulatedBeta = Annotated[float, typer.Option(min=0, help="Simulated device: milliseconds a token adds.")]
LogLevel = Annotated[str, typer.Option(parser=_choice(*_LEVELS), metavar="|".join(_LEVELS), help="Least level logged.")]
