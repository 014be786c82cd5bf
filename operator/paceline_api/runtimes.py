"""What routers, dashboards and people must know of each engine software: what it understands, where it tells its load.

How its pods are made is the planner's (`planner/runtimes`). Engines other than ours get none of Paceline's private
headers: they would ignore them, and a tenant's salt is nobody else's business. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PACELINE = "paceline"


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Prometheus text at `path` of the http port; the sum of the gauges `names` is the number of requests there."""

    path: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """One engine software.

    `ours`: it understands the private headers. `checks_token`: it asks for the namespace's internal token, so routers
    send it. `metrics`: what a figure is called there, by the names that Paceline's own engines use for it.
    """

    ours: bool = False
    checks_token: bool = False
    load: LoadSource | None = None
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])


# The figures that panels and alerts are built from, by the names that our engines emit.
FIGURES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds",
)
_VLLM = {name: name for name in FIGURES}
# Releases differ in whether the names carry vLLM's prefix; none has both.
_NIM_LOAD = (*FIGURES[:2], *(name.removeprefix("vllm:") for name in FIGURES[:2]))
_SGLANG = {
    "vllm:num_requests_running": "sglang:num_running_reqs",
    "vllm:num_requests_waiting": "sglang:num_queue_reqs",
    "vllm:kv_cache_usage_perc": "sglang:token_usage",
    "vllm:prompt_tokens_total": "sglang:prompt_tokens_total",
    "vllm:generation_tokens_total": "sglang:generation_tokens_total",
    "vllm:time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
}
_LLAMACPP = {
    "vllm:num_requests_running": "llamacpp:requests_processing",
    "vllm:num_requests_waiting": "llamacpp:requests_deferred",
    "vllm:prompt_tokens_total": "llamacpp:prompt_tokens_total",
    "vllm:generation_tokens_total": "llamacpp:tokens_predicted_total",
}
_TRITON = {"vllm:num_requests_waiting": "nv_inference_pending_request_count"}


def _load(path: str, metrics: Mapping[str, str]) -> LoadSource:
    return LoadSource(path, tuple(metrics[name] for name in FIGURES[:2] if name in metrics))


RUNTIMES: Mapping[str, RuntimeFacts] = {
    PACELINE: RuntimeFacts(ours=True, checks_token=True, metrics=_VLLM),
    "vllm": RuntimeFacts(checks_token=True, load=_load("/metrics", _VLLM), metrics=_VLLM),
    "sglang": RuntimeFacts(load=_load("/metrics", _SGLANG), metrics=_SGLANG),
    "llamacpp": RuntimeFacts(checks_token=True, load=_load("/metrics", _LLAMACPP), metrics=_LLAMACPP),
    "ollama": RuntimeFacts(),
    "trtllm": RuntimeFacts(),
    "tritonserver": RuntimeFacts(load=_load("/metrics", _TRITON), metrics=_TRITON),
    "nim": RuntimeFacts(load=LoadSource("/v1/metrics", _NIM_LOAD), metrics=_VLLM),
    "custom": RuntimeFacts(),
}
_UNKNOWN = RuntimeFacts()


def facts_of(runtime: str) -> RuntimeFacts:
    """The facts; for a name that this version does not know those of an engine that has nothing of ours."""
    return RUNTIMES.get(runtime, _UNKNOWN)
