"""The one catalogue of metrics: name, type, labels, unit, buckets and help.

Code creates instruments from it, documentation, dashboards and rules are checked against it, and tests compare it with
a live scrape. Own names start with `paceline_`; engines also emit the `vllm:` names that existing tools query. `tenant`
is a label on router counters and two router histograms only, with configured names. Pure: no prometheus import here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family. Counters are named without `_total`, which the exposition adds."""

    name: str
    type: MetricType
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        return f"{self.name}_total" if self.type is MetricType.COUNTER else self.name


TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TOKEN_BUCKETS = (
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1000.0,
    2000.0,
    5000.0,
    10000.0,
    20000.0,
    50000.0,
)

_C, _G, _H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM
_MODEL = ("model_name",)
_VLLM = ("model_name", "engine")

ENGINE = (
    Metric(name="paceline_engine_requests_running", type=_G, labels=_MODEL, help="Requests with blocks on the device."),
    Metric(name="paceline_engine_requests_waiting", type=_G, labels=_MODEL, help="Accepted requests without blocks."),
    Metric(name="paceline_engine_kv_blocks", type=_G, labels=_MODEL, help="KV blocks in the pool."),
    Metric(name="paceline_engine_kv_blocks_free", type=_G, labels=_MODEL, help="KV blocks that no request holds."),
    Metric(name="paceline_engine_kv_blocks_cached", type=_G, labels=_MODEL,
           help="KV blocks that no request holds and a prefix hit would find."),
    Metric(name="paceline_engine_waiting_reason", type=_G, labels=("model_name", "reason"),
           help="Accepted requests without blocks, by what they wait for."),
    Metric(name="paceline_engine_prefix_query_tokens", type=_C, labels=_MODEL,
           help="Prompt tokens looked up in the prefix cache."),
    Metric(name="paceline_engine_prefix_hit_tokens", type=_C, labels=_MODEL,
           help="Prompt tokens found in the prefix cache."),
    Metric(name="paceline_engine_spec_draft_tokens", type=_C, labels=_MODEL, help="Guessed tokens that were verified."),
    Metric(name="paceline_engine_spec_accepted_tokens", type=_C, labels=_MODEL, help="Guessed tokens that were kept."),
    Metric(name="paceline_engine_spec_accepted_position_tokens", type=_C, labels=("model_name", "position"),
           help="Guessed tokens that were kept, by their place in the draft, from 0."),
    Metric(name="paceline_engine_deadline_refusals", type=_C, labels=_MODEL,
           help="Requests refused on arrival because their deadline could not be met."),
    Metric(name="paceline_engine_deadline_misses", type=_C, labels=_MODEL,
           help="Accepted requests that were cut at their deadline."),
    Metric(name="paceline_engine_step_alpha_seconds", type=_G, unit="seconds", labels=_MODEL,
           help="Fitted time of a step without its tokens."),
    Metric(name="paceline_engine_step_beta_seconds", type=_G, unit="seconds", labels=_MODEL,
           help="Fitted time that a token adds to a step."),
    Metric(name="paceline_engine_prefill_tokens_per_second", type=_G, labels=_MODEL,
           help="Measured speed of prefill; 0 until measured."),
    Metric(name="paceline_engine_preemptions", type=_C, labels=_MODEL, help="Requests that lost their blocks."),
    Metric(name="paceline_engine_kv_offloaded_sequences", type=_C, labels=_MODEL,
           help="Preempted sequences whose KV went to the memory tier."),
    Metric(name="paceline_engine_kv_restored_sequences", type=_C, labels=_MODEL,
           help="Preempted sequences whose KV came back from the memory tier."),
    Metric(name="paceline_engine_kv_store_bytes", type=_G, unit="bytes", labels=_MODEL,
           help="Bytes in the engine's memory tier."),
    Metric(name="paceline_engine_kv_loaded_tokens", type=_C, labels=("model_name", "tier"),
           help="Tokens of prompts whose KV was brought back from the KV store, by tier."),
    Metric(name="paceline_engine_kv_dropped_chunks", type=_C, labels=_MODEL,
           help="Chunks of KV that gave way to newer ones while the KV store had no room to write."),
    Metric(name="paceline_engine_kv_handoffs", type=_C, labels=("model_name", "side", "outcome"),
           help="Prompts handed over to another engine (side prefill) or by one (decode), by what became of it."),
    Metric(name="paceline_engine_kv_leases", type=_G, labels=("model_name", "side"),
           help="Leases of handed-over KV: given and not expired (side prefill), taken over and not ended (decode)."),
    Metric(name="paceline_engine_steps", type=_C, labels=_MODEL, help="Scheduler steps that ran a batch."),
    Metric(name="paceline_engine_scheduled_tokens", type=_C, labels=_MODEL, help="Tokens computed over all steps."),
    Metric(name="paceline_engine_step_seconds", type=_C, unit="seconds", labels=_MODEL, help="Time spent in steps."),
    Metric(name="paceline_engine_requests", type=_C, labels=("model_name", "finish_reason"),
           help="Requests that ended, by how."),
    Metric(name="paceline_engine_requests_rejected", type=_C, labels=("model_name", "reason"),
           help="Requests refused before they were accepted."),
    Metric(name="paceline_engine_prompt_tokens", type=_C, labels=_MODEL, help="Prompt tokens of accepted requests."),
    Metric(name="paceline_engine_generation_tokens", type=_C, labels=_MODEL, help="Tokens delivered."),
    Metric(name="paceline_engine_time_to_first_token_seconds", type=_H, unit="seconds", labels=_MODEL,
           buckets=TTFT_BUCKETS, help="From arrival to the first token."),
    Metric(name="paceline_engine_inter_token_latency_seconds", type=_H, unit="seconds", labels=_MODEL,
           buckets=TPOT_BUCKETS, help="Gap between tokens of one request."),
    Metric(name="paceline_engine_request_seconds", type=_H, unit="seconds", labels=_MODEL, buckets=LATENCY_BUCKETS,
           help="From arrival to the last token."),
    Metric(name="paceline_engine_load_seconds", type=_G, unit="seconds", labels=_MODEL,
           help="From process start to ready."),
)  # fmt: skip

_GPU = ("model_name", "gpu")
# Exposed only by an engine that runs on a GPU, and of that only what the GPU and its driver tell. gpu: the index that
# nvidia-smi shows, INDEX:PART of a MIG device.
ENGINE_GPU = (
    Metric(name="paceline_engine_gpu_info", type=_G, labels=(*_GPU, "uuid", "name"),
           help="A GPU of this engine; always 1."),
    Metric(name="paceline_engine_gpu_up", type=_G, labels=_GPU,
           help="1 while the GPU answers its driver; else its other gauges are missing."),
    Metric(name="paceline_engine_gpu_busy_ratio", type=_G, unit="ratio", labels=_GPU,
           help="Share of time in which a kernel ran, whatever part of the GPU it used (NVML)."),
    Metric(name="paceline_engine_gpu_memory_busy_ratio", type=_G, unit="ratio", labels=_GPU,
           help="Share of time in which device memory was read or written, however fast (NVML)."),
    Metric(name="paceline_engine_gpu_memory_bandwidth_ratio", type=_G, unit="ratio", labels=_GPU,
           help="Device memory traffic over its peak, since the reading before (NVML, Hopper and later)."),
    Metric(name="paceline_engine_gpu_memory_used_bytes", type=_G, unit="bytes", labels=_GPU,
           help="Device memory in use, by whomever."),
    Metric(name="paceline_engine_gpu_memory_total_bytes", type=_G, unit="bytes", labels=_GPU, help="Device memory."),
    Metric(name="paceline_engine_gpu_power_watts", type=_G, unit="watts", labels=_GPU, help="Power draw of the card."),
    Metric(name="paceline_engine_gpu_energy_joules", type=_C, unit="joules", labels=_GPU,
           help="Energy that the card has used since the driver was loaded."),
    Metric(name="paceline_engine_gpu_temperature_celsius", type=_G, unit="celsius", labels=_GPU,
           help="Temperature of the chip."),
    Metric(name="paceline_engine_gpu_sm_clock_hertz", type=_G, unit="hertz", labels=_GPU,
           help="Clock of the multiprocessors."),
    Metric(name="paceline_engine_gpu_memory_clock_hertz", type=_G, unit="hertz", labels=_GPU,
           help="Clock of the device memory."),
    Metric(name="paceline_engine_gpu_clock_limited", type=_G, labels=(*_GPU, "reason"),
           help="1 while clocks are held down for this reason."),
    Metric(name="paceline_engine_gpu_ecc_errors", type=_C, labels=(*_GPU, "error"),
           help="Memory errors that ECC found since the driver was loaded: corrected, uncorrected."),
    Metric(name="paceline_engine_gpu_pcie_replays", type=_C, labels=_GPU, help="PCIe transfers that were repeated."),
    Metric(name="paceline_engine_gpu_xid_errors", type=_C, labels=_GPU,
           help="Critical errors of the card (XID) since the engine began to serve."),
    Metric(name="paceline_engine_gpu_last_xid", type=_G, labels=_GPU,
           help="NVIDIA's code of the last critical error; missing before the first."),
    Metric(name="paceline_engine_gpu_sampled_steps", type=_C, labels=_MODEL,
           help="Steps whose time on the first GPU was measured."),
    Metric(name="paceline_engine_gpu_step_seconds", type=_C, unit="seconds", labels=_MODEL,
           help="Time of the sampled steps on the GPU, from when their work begins to arrive to its end."),
    Metric(name="paceline_engine_gpu_sampled_gaps", type=_C, labels=_MODEL,
           help="Gaps between a step and a sampled next one that requests waited through."),
    Metric(name="paceline_engine_gpu_gap_seconds", type=_C, unit="seconds", labels=_MODEL,
           help="Time in the sampled gaps, in which the GPU had no step to work on."),
    Metric(name="paceline_engine_gpu_sampled_collectives", type=_C, labels=("model_name", "group"),
           help="Collective operations in sampled steps, CUDA graphs left out, by process group."),
    Metric(name="paceline_engine_gpu_collective_seconds", type=_C, unit="seconds", labels=("model_name", "group"),
           help="GPU time of the sampled collective operations, waiting for other ranks included."),
)  # fmt: skip

ENGINE_COMPAT = (
    Metric(name="vllm:num_requests_running", type=_G, labels=_VLLM, help="Requests in the running batch."),
    Metric(name="vllm:num_requests_waiting", type=_G, labels=_VLLM, help="Requests waiting for blocks."),
    Metric(name="vllm:kv_cache_usage_perc", type=_G, labels=_VLLM, help="Share of KV blocks in use, 0 to 1."),
    Metric(name="vllm:num_preemptions", type=_C, labels=_VLLM, help="Requests that lost their blocks."),
    Metric(name="vllm:prefix_cache_queries", type=_C, labels=_VLLM, help="Prompt tokens looked up."),
    Metric(name="vllm:prefix_cache_hits", type=_C, labels=_VLLM, help="Prompt tokens found."),
    Metric(name="vllm:spec_decode_num_drafts", type=_C, labels=_VLLM, help="Verifications of guesses."),
    Metric(name="vllm:spec_decode_num_draft_tokens", type=_C, labels=_VLLM, help="Guessed tokens verified."),
    Metric(name="vllm:spec_decode_num_accepted_tokens", type=_C, labels=_VLLM, help="Guessed tokens kept."),
    Metric(name="vllm:spec_decode_num_accepted_tokens_per_pos", type=_C, labels=(*_VLLM, "position"),
           help="Guessed tokens kept, by their place in the draft."),
    Metric(name="vllm:prompt_tokens", type=_C, labels=_VLLM, help="Prompt tokens."),
    Metric(name="vllm:generation_tokens", type=_C, labels=_VLLM, help="Generated tokens."),
    Metric(name="vllm:request_success", type=_C, labels=(*_VLLM, "finished_reason"), help="Finished requests."),
    Metric(name="vllm:time_to_first_token_seconds", type=_H, labels=_VLLM, buckets=TTFT_BUCKETS,
           help="Time to first token."),
    Metric(name="vllm:inter_token_latency_seconds", type=_H, labels=_VLLM, buckets=TPOT_BUCKETS,
           help="Inter-token latency."),
    Metric(name="vllm:request_time_per_output_token_seconds", type=_H, labels=_VLLM, buckets=TPOT_BUCKETS,
           help="Time per output token after the first."),
    Metric(name="vllm:e2e_request_latency_seconds", type=_H, labels=_VLLM, buckets=LATENCY_BUCKETS,
           help="End-to-end latency."),
    Metric(name="vllm:request_prompt_tokens", type=_H, labels=_VLLM, buckets=TOKEN_BUCKETS, help="Prompt length."),
    Metric(name="vllm:request_generation_tokens", type=_H, labels=_VLLM, buckets=TOKEN_BUCKETS, help="Output length."),
    Metric(name="vllm:cache_config_info", type=_G, labels=(*_VLLM, "block_size", "num_gpu_blocks"),
           help="Geometry of the KV pool; always 1."),
)  # fmt: skip

_TENANT_MODEL = ("tenant", "model_name")
ROUTER = (
    Metric(name="paceline_router_requests", type=_C, labels=("tenant", "model_name", "code"),
           help="Requests answered, by HTTP status."),
    Metric(name="paceline_router_requests_in_flight", type=_G, labels=_MODEL, help="Requests being proxied."),
    Metric(name="paceline_router_slo_requests", type=_C, labels=("tenant", "model_name", "outcome"),
           help="Requests by the SLO judge's verdict."),
    Metric(name="paceline_router_time_to_first_token_seconds", type=_H, unit="seconds", labels=_TENANT_MODEL,
           buckets=TTFT_BUCKETS, help="From accept to the first content chunk."),
    Metric(name="paceline_router_time_per_output_token_seconds", type=_H, unit="seconds", labels=_TENANT_MODEL,
           buckets=TPOT_BUCKETS, help="Time per output token after the first."),
    Metric(name="paceline_router_endpoints", type=_G, labels=("model_name", "state"),
           help="Engine endpoints known, by state."),
    Metric(name="paceline_router_upstream_errors", type=_C, labels=("model_name", "reason"),
           help="Failed attempts at an engine."),
    Metric(name="paceline_router_auth_refusals", type=_C, labels=("reason",), help="Requests refused for credentials."),
    Metric(name="paceline_router_watch_restarts", type=_C, labels=("kind",), help="Watches that were re-established."),
)  # fmt: skip

OPERATOR = (
    Metric(name="paceline_operator_reconciles", type=_C, labels=("kind", "result"), help="Reconciles, by result."),
    Metric(name="paceline_operator_reconcile_seconds", type=_H, unit="seconds", labels=("kind",), buckets=STEP_BUCKETS,
           help="Duration of a reconcile."),
    Metric(name="paceline_operator_queue_depth", type=_G, help="Keys waiting for a worker."),
    Metric(name="paceline_operator_writes", type=_C, labels=("verb", "kind"), help="Writes sent to the API."),
    Metric(name="paceline_operator_leader", type=_G, help="1 while this process holds the Lease."),
    Metric(name="paceline_operator_ghosts", type=_C, labels=("kind",),
           help="Index entries that a real list no longer had."),
)  # fmt: skip

_TIER = ("tier",)
_READ_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
# Of a tiered KV store, in an engine or a node server. tier: memory, disk, s3. Bytes are of payloads but where said.
KV_STORE = (
    Metric(name="paceline_kvstore_used_bytes", type=_G, unit="bytes", labels=_TIER,
           help="Bytes that chunks take in the tier, headers and padding included; in S3 those this process added."),
    Metric(name="paceline_kvstore_capacity_bytes", type=_G, unit="bytes", labels=_TIER, help="Bound on used bytes."),
    Metric(name="paceline_kvstore_hits", type=_C, labels=_TIER, help="Reads that returned a chunk."),
    Metric(name="paceline_kvstore_misses", type=_C, labels=_TIER, help="Reads of chunks that were not there."),
    Metric(name="paceline_kvstore_late_reads", type=_C, labels=_TIER,
           help="Reads that were of no use when they came: past the deadline, cancelled, or after a missing chunk."),
    Metric(name="paceline_kvstore_read_bytes", type=_C, unit="bytes", labels=_TIER, help="Bytes read."),
    Metric(name="paceline_kvstore_read_seconds", type=_H, unit="seconds", labels=_TIER, buckets=_READ_BUCKETS,
           help="Time of a read that returned a chunk, its queue not included."),
    Metric(name="paceline_kvstore_reads_queued", type=_G, labels=_TIER, help="Reads and lookups waiting or under way."),
    Metric(name="paceline_kvstore_writes", type=_C, labels=_TIER, help="Chunks that the tier took in."),
    Metric(name="paceline_kvstore_written_bytes", type=_C, unit="bytes", labels=_TIER, help="Their bytes."),
    Metric(name="paceline_kvstore_write_queue_bytes", type=_G, unit="bytes", labels=_TIER,
           help="Bytes that wait to be written, or are being written."),
    Metric(name="paceline_kvstore_dropped_writes", type=_C, labels=_TIER,
           help="Chunks not written because the queue was full."),
    Metric(name="paceline_kvstore_refused_writes", type=_C, labels=_TIER,
           help="Chunks that the tier or a tenant's quota did not take."),
    Metric(name="paceline_kvstore_promotions", type=_C, labels=_TIER, help="Chunks sent up to the tier when used."),
    Metric(name="paceline_kvstore_demotions", type=_C, labels=_TIER, help="Chunks sent down to the tier when used."),
    Metric(name="paceline_kvstore_evictions", type=_C, labels=_TIER, help="Chunks that made room for others."),
    Metric(name="paceline_kvstore_expired", type=_C, labels=_TIER, help="Chunks dropped for their age."),
    Metric(name="paceline_kvstore_corrupt_chunks", type=_C, labels=_TIER,
           help="Chunks refused because bytes, key or version were wrong."),
    Metric(name="paceline_kvstore_errors", type=_C, labels=_TIER, help="Calls that ended in an I/O error."),
    Metric(name="paceline_kvstore_lookups", type=_C, labels=_TIER, help="Background lookups in the tier."),
    Metric(name="paceline_kvstore_refused_lookups", type=_C, labels=_TIER,
           help="Background lookups for which there was no room: taken as misses."),
    Metric(name="paceline_kvstore_breaker_open", type=_G, labels=("tier", "direction"),
           help="1 while reads or writes of a tier behind breakers are not tried, 0.5 while they are probed."),
    Metric(name="paceline_kvstore_latency_seconds", type=_G, unit="seconds", labels=_TIER,
           help="Live estimate of the smallest read."),
    Metric(name="paceline_kvstore_bandwidth_bytes_per_second", type=_G, labels=_TIER,
           help="Live estimate of a long read's speed; infinite while size makes no difference."),
    Metric(name="paceline_kvstore_leases", type=_G, help="Chunks lent to requests."),
    Metric(name="paceline_kvstore_leased_bytes", type=_G, unit="bytes", help="Their bytes."),
    Metric(name="paceline_kvstore_decisions", type=_C, labels=("choice",),
           help="Decisions between loading and computing whose outcome is known: load, compute."),
    Metric(name="paceline_kvstore_regret_seconds", type=_C, unit="seconds", labels=("choice",),
           help="Time to first token that the other choice would have saved."),
    Metric(name="paceline_kvstore_saved_seconds", type=_C, unit="seconds", labels=("choice",),
           help="Time to first token that the choice saved beside the other one."),
)  # fmt: skip

_REQUEST_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
KV_SERVER = (
    Metric(name="paceline_kvserver_requests", type=_C, labels=("operation", "outcome"),
           help="Requests of clients: ok, miss, too_large, refused, lost (the connection ended first)."),
    Metric(name="paceline_kvserver_request_seconds", type=_H, unit="seconds", labels=("operation",),
           buckets=_REQUEST_BUCKETS, help="From a request's first byte to its answer's last."),
    Metric(name="paceline_kvserver_payload_bytes", type=_C, unit="bytes", labels=("direction",),
           help="Bytes of KV sent to and received from clients."),
    Metric(name="paceline_kvserver_connections", type=_G, help="Clients' connections."),
    Metric(name="paceline_kvserver_connections_closed", type=_C, labels=("reason",),
           help="Connections that ended: closed by the client, or by the server for another reason."),
    Metric(name="paceline_kvserver_receiving_bytes", type=_G, unit="bytes", help="Memory lent to puts under way."),
    Metric(name="paceline_kvserver_pinned_chunks", type=_G, help="Chunks that pins hold."),
    Metric(name="paceline_kvserver_pinned_bytes", type=_G, unit="bytes", help="Bytes of KV that pins hold."),
    Metric(name="paceline_kvserver_corrupt_chunks", type=_C,
           help="Chunks refused because bytes, key or version were wrong, on arrival or in the tier."),
    Metric(name="paceline_kvserver_tier_bytes", type=_G, unit="bytes", help="Bytes that chunks take in the tier."),
    Metric(name="paceline_kvserver_tier_capacity_bytes", type=_G, unit="bytes", help="Bound on the tier's bytes."),
    Metric(name="paceline_kvserver_tier_hits", type=_C, help="Reads that the tier answered with a chunk."),
    Metric(name="paceline_kvserver_tier_misses", type=_C, help="Reads of chunks that the tier doesn't have."),
    Metric(name="paceline_kvserver_tier_puts", type=_C, help="Chunks that the tier took in."),
    Metric(name="paceline_kvserver_tier_refused", type=_C, help="Chunks that the tier didn't keep."),
    Metric(name="paceline_kvserver_tier_evictions", type=_C, help="Chunks that made room for others."),
    Metric(name="paceline_kvserver_tier_expired", type=_C, help="Chunks dropped for their age."),
    Metric(name="paceline_kvserver_tier_errors", type=_C, help="Calls of the tier that ended in an I/O error."),
)  # fmt: skip

CATALOGUE: tuple[Metric, ...] = ENGINE + ENGINE_GPU + ENGINE_COMPAT + ROUTER + OPERATOR + KV_STORE + KV_SERVER
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}
