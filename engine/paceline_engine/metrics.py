"""The engine's Prometheus instruments, made from the catalogue in an injected registry.

Everything is derived from what this process sees: the core's statistics and the outputs of requests. The `vllm:` names
carry the same numbers for tools that query them. No HTTP here.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline_api.metrics import ENGINE, ENGINE_COMPAT, Metric, MetricType
from paceline_engine.core.waiting import REASONS as WAITING_REASONS
from paceline_engine.messages import CoreReady, CoreStats

_GAUGES = {
    "paceline_engine_requests_running": "num_running",
    "paceline_engine_requests_waiting": "num_waiting",
    "paceline_engine_kv_blocks": "num_blocks",
    "paceline_engine_kv_blocks_free": "num_free_blocks",
    "paceline_engine_kv_blocks_cached": "num_cached_blocks",
    "paceline_engine_step_alpha_seconds": "step_alpha_seconds",
    "paceline_engine_step_beta_seconds": "step_beta_seconds",
    "paceline_engine_prefill_tokens_per_second": "prefill_tokens_per_second",
    "paceline_engine_kv_store_bytes": "kv_store_bytes",
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
}
_COUNTERS = {
    "paceline_engine_preemptions": "num_preemptions",
    "paceline_engine_kv_offloaded_sequences": "kv_offloaded_sequences",
    "paceline_engine_kv_restored_sequences": "kv_restored_sequences",
    "paceline_engine_kv_dropped_chunks": "kv_dropped_chunks",
    "paceline_engine_steps": "num_steps",
    "paceline_engine_scheduled_tokens": "num_scheduled_tokens",
    "paceline_engine_step_seconds": "step_seconds",
    "paceline_engine_prefix_query_tokens": "prefix_query_tokens",
    "paceline_engine_prefix_hit_tokens": "prefix_hit_tokens",
    "paceline_engine_spec_draft_tokens": "spec_draft_tokens",
    "paceline_engine_spec_accepted_tokens": "spec_accepted_tokens",
    "paceline_engine_deadline_refusals": "num_deadline_refusals",
    "paceline_engine_deadline_misses": "num_deadline_misses",
    "vllm:num_preemptions": "num_preemptions",
    "vllm:prefix_cache_queries": "prefix_query_tokens",
    "vllm:prefix_cache_hits": "prefix_hit_tokens",
    "vllm:spec_decode_num_drafts": "spec_drafts",
    "vllm:spec_decode_num_draft_tokens": "spec_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "spec_accepted_tokens",
}


def _instrument(metric: Metric, registry: CollectorRegistry) -> Any:
    """The prometheus_client object for a catalogue entry."""
    if metric.type is MetricType.COUNTER:
        return Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.type is MetricType.GAUGE:
        return Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


class EngineMetrics:
    """All engine instruments with their constant labels applied. Times are seconds."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._constant = {"model_name": model_name, "engine": "0"}
        self._instruments = {metric.name: _instrument(metric, registry) for metric in ENGINE + ENGINE_COMPAT}
        self._labels = {metric.name: metric.labels for metric in ENGINE + ENGINE_COMPAT}
        self._stats = CoreStats()
        # The registry's own look-up costs more than all else that a token costs here; it keeps as many itself.
        self._children: dict[tuple[str, ...], Any] = {}

    def _get(self, name: str, **labels: str) -> Any:
        key = (name, *labels.values())
        child = self._children.get(key)
        if child is None:
            values = self._constant | labels
            child = self._instruments[name].labels(**{label: values[label] for label in self._labels[name]})
            self._children[key] = child
        return child

    def on_ready(self, ready: CoreReady, load_seconds: float) -> None:
        """The core is up, `load_seconds` after the start of this process."""
        self._get("paceline_engine_load_seconds").set(load_seconds)
        geometry = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        self._get("vllm:cache_config_info", **geometry).set(1)

    def on_stats(self, stats: CoreStats) -> None:
        """The core's statistics after a step; counters are advanced by what was added since the last."""
        for name, field in _GAUGES.items():
            self._get(name).set(getattr(stats, field))
        for name, field in _COUNTERS.items():
            self._get(name).inc(max(0, getattr(stats, field) - getattr(self._stats, field)))
        for reason in WAITING_REASONS:
            self._get("paceline_engine_waiting_reason", reason=reason).set(stats.waiting_reasons.get(reason, 0))
        for tier, num_tokens in stats.kv_loaded_tokens.items():
            new = num_tokens - self._stats.kv_loaded_tokens.get(tier, 0)
            self._get("paceline_engine_kv_loaded_tokens", tier=tier).inc(max(0, new))
        for outcome, count in stats.handoffs.items():
            side, _, what = outcome.partition(" ")
            new = count - self._stats.handoffs.get(outcome, 0)
            self._get("paceline_engine_kv_handoffs", side=side, outcome=what).inc(max(0, new))
        for side, count in stats.kv_leases.items():
            self._get("paceline_engine_kv_leases", side=side).set(count)
        self._count_positions(stats)
        used = stats.num_blocks - stats.num_free_blocks
        self._get("vllm:kv_cache_usage_perc").set(used / stats.num_blocks if stats.num_blocks else 0.0)
        self._stats = stats

    def device_counters(self) -> dict[str, float]:
        """What the core's device counts, as of the last step."""
        return self._stats.device

    def _count_positions(self, stats: CoreStats) -> None:
        known = self._stats.spec_accepted_per_position
        for position, count in enumerate(stats.spec_accepted_per_position):
            new = count - (known[position] if position < len(known) else 0)
            for name in (
                "paceline_engine_spec_accepted_position_tokens",
                "vllm:spec_decode_num_accepted_tokens_per_pos",
            ):
                self._get(name, position=str(position)).inc(max(0, new))

    def on_rejected(self, reason: str) -> None:
        """A request was refused; `reason` is one of a fixed set."""
        self._get("paceline_engine_requests_rejected", reason=reason).inc()

    def on_accepted(self, num_prompt_tokens: int) -> None:
        """A request was submitted to the core."""
        for name in ("paceline_engine_prompt_tokens", "vllm:prompt_tokens"):
            self._get(name).inc(num_prompt_tokens)
        self._get("vllm:request_prompt_tokens").observe(num_prompt_tokens)

    def on_first_token(self, seconds: float) -> None:
        """From arrival to the first token."""
        for name in ("paceline_engine_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
            self._get(name).observe(seconds)

    def on_next_token(self, seconds: float) -> None:
        """Gap to the token before."""
        for name in ("paceline_engine_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"):
            self._get(name).observe(seconds)

    def on_tokens(self, count: int) -> None:
        """Tokens that count as the request's output."""
        for name in ("paceline_engine_generation_tokens", "vllm:generation_tokens"):
            self._get(name).inc(count)

    def on_finished(self, reason: str, seconds: float, num_tokens: int, decode_seconds: float) -> None:
        """A request ended, `seconds` after arrival; `decode_seconds` from its first token to its last."""
        self._get("paceline_engine_requests", finish_reason=reason).inc()
        self._get("vllm:request_success", finished_reason=reason).inc()
        for name in ("paceline_engine_request_seconds", "vllm:e2e_request_latency_seconds"):
            self._get(name).observe(seconds)
        self._get("vllm:request_generation_tokens").observe(num_tokens)
        if num_tokens > 1:
            self._get("vllm:request_time_per_output_token_seconds").observe(decode_seconds / (num_tokens - 1))
