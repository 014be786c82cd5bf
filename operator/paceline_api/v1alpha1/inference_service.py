"""InferenceService: one model, served by a fleet of engine replicas."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from paceline_api.v1alpha1.base import (
    Argument,
    BaseStatus,
    Built,
    Cel,
    Column,
    Decimal2,
    Duration,
    LocalRef,
    LongText,
    Naming,
    ObjectName,
    Part,
    Quantity,
    Resource,
    Slo,
    Text,
    Unbuilt,
)

SOURCE_PATTERN = r"^(hf|s3|pvc|file|package|image)://.+$"
DRAFT_SOURCE_PATTERN = r"^(hf|s3|file|package)://.+$"
CLAIM_PATTERN = r"^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+$"
REVISION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
SERVED_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$"
CLAIM_MESSAGE = "a volume's source is written pvc://CLAIM/PATH"
DRAFT_MESSAGE = "draftSource belongs to method draft, which needs it"
REVISION_MESSAGE = "a revision belongs to an hf:// source that has none written into it"
MODEL_LEN_MAX = 1_048_576


class Runtime(StrEnum):
    PACELINE = "paceline"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OLLAMA = "ollama"
    TRTLLM = "trtllm"
    TRITONSERVER = "tritonserver"
    NIM = "nim"
    CUSTOM = "custom"


class Batching(StrEnum):
    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


class PrefixIndex(StrEnum):
    HASH = "hash"
    RADIX = "radix"


class KvCacheDtype(StrEnum):
    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"


class Quantization(StrEnum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class SpeculativeMethod(StrEnum):
    NONE = "none"
    NGRAM = "ngram"
    DRAFT = "draft"
    SELF_DRAFT = "selfDraft"


class Acceptance(StrEnum):
    EXACT = "exact"
    LENIENT = "lenient"


class ScalingPolicy(StrEnum):
    NONE = "none"
    EXTERNAL = "external"
    GOODPUT = "goodput"


class RoutingPolicy(StrEnum):
    LEAST_LOADED = "leastLoaded"
    ROUND_ROBIN = "roundRobin"
    PREDICTED = "predicted"
    CACHE_AWARE = "cacheAware"
    SESSION_AFFINITY = "sessionAffinity"


class RolloutStrategy(StrEnum):
    AUTO = "auto"
    SURGE = "surge"
    IN_PLACE = "inPlace"


class Adapter(Part):
    """A LoRA adapter served beside the base model."""

    name: Text = Field(description="Model name that requests use for the adapter.")
    source: LongText = Field(description="Where its weights are; same schemes as the model's source.")


class ModelSpec(Part):
    """Which weights, under which name."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel(
            f"!self.source.startsWith('pvc://') || self.source.matches('{CLAIM_PATTERN}')",
            CLAIM_MESSAGE,
            "source",
        ),
        Cel(
            "!has(self.revision) || self.source.startsWith('hf://') && !self.source.contains('@')",
            REVISION_MESSAGE,
            "revision",
        ),
    )

    source: Annotated[str, StringConstraints(pattern=SOURCE_PATTERN, max_length=1024)] = Field(
        description="package://PACKAGE/FILE.gguf in an installed Python package, or file:///PATH to a .gguf file or a "
        "Hugging Face folder (config.json, *.safetensors, tokenizer.json) in the engine's file system; "
        "hf://ORG/NAME or hf://ORG/NAME/FILE.gguf on the Hugging Face Hub; s3://BUCKET/PREFIX or s3://BUCKET/KEY.gguf; "
        "pvc://CLAIM/PATH to a file or folder in a PersistentVolumeClaim, mounted read-only; image://NAME where the "
        "image brings its model (runtimes nim and custom)."
    )
    revision: Annotated[str, StringConstraints(pattern=REVISION_PATTERN, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// source. Default: main, at the first download."
    )
    credentials_secret_ref: LocalRef | None = Field(
        default=None,
        description="Secret whose keys become environment variables of the engines, such as HF_TOKEN or "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL_S3.",
    )
    served_name: Annotated[str, StringConstraints(pattern=SERVED_NAME_PATTERN, max_length=128)] | None = Field(
        default=None, description="Name that clients put into `model`. Default: metadata.name."
    )
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = Field(
        default=None, description="Jinja chat template in place of the checkpoint's own."
    )
    adapters: Annotated[
        Annotated[
            list[Adapter],
            Field(
                max_length=64,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None,
        Unbuilt("LoRA adapters"),
    ] = Field(default=None, description="LoRA adapters.")

    @field_validator("source")
    @classmethod
    def _names_claim_and_path(cls, source: str) -> str:
        if source.startswith("pvc://") and re.fullmatch(CLAIM_PATTERN, source) is None:
            raise PydanticCustomError("source", "{message}", {"message": CLAIM_MESSAGE})
        return source

    @model_validator(mode="after")
    def _revision_of_hub(self) -> Self:
        if self.revision is not None and (not self.source.startswith("hf://") or "@" in self.source):
            raise PydanticCustomError("revision", "{message}", {"message": REVISION_MESSAGE})
        return self


class Resources(Part):
    """Compute resources of one engine container, as Kubernetes names them."""

    requests: Annotated[dict[Text, Quantity], Field(max_length=16)] | None = Field(
        default=None, description="What the scheduler reserves."
    )
    limits: Annotated[dict[Text, Quantity], Field(max_length=16)] | None = Field(
        default=None, description="What the container may not exceed."
    )


class Speculative(Part):
    """Speculative decoding."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel("(self.method == 'draft') == has(self.draftSource)", DRAFT_MESSAGE, "draftSource"),
    )

    method: SpeculativeMethod = Field(
        description="Who drafts. ngram: what followed the latest tokens earlier in the same text. draft: a model "
        "of its own, with the same vocabulary. selfDraft: the model itself, made cheaper."
    )
    num_tokens: Annotated[str, StringConstraints(pattern=r"^(auto|[1-9]|[12][0-9]|3[0-2])$", max_length=4)] | None = (
        Field(default=None, description="Draft tokens a step, 1 to 32, or auto: by what is accepted. Default: auto.")
    )
    draft_source: Annotated[str, StringConstraints(pattern=DRAFT_SOURCE_PATTERN, max_length=1024)] | None = Field(
        default=None, description="Weights of the draft model, of method draft; package://, file://, hf:// or s3://."
    )
    acceptance: Acceptance | None = Field(
        default=None,
        description="exact keeps the target distribution. lenient keeps a guess twice as readily: faster, "
        "but outputs no longer follow the model. Default: exact.",
    )
    traffic_classes: Annotated[dict[Text, bool], Field(max_length=32)] | None = Field(
        default=None, description="Where speculation is on, by traffic class. Default: everywhere."
    )

    @model_validator(mode="after")
    def _draft_has_a_source(self) -> Self:
        if (self.method is SpeculativeMethod.DRAFT) != (self.draft_source is not None):
            raise PydanticCustomError("draft", "{message}", {"message": DRAFT_MESSAGE})
        return self


GpuShare = Annotated[str, StringConstraints(pattern=r"^(0?\.[0-9]*[1-9][0-9]*|1(\.0+)?)$", max_length=8)]


class EngineSpec(Part):
    """The engine that runs the model. Names follow vLLM; the command line has the same names in kebab-case."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel(
            "!has(self.maxNumBatchedTokens) || !has(self.maxNumSeqs) || self.maxNumBatchedTokens >= self.maxNumSeqs",
            "maxNumBatchedTokens must be at least maxNumSeqs, or running sequences could not all take a step",
            "maxNumBatchedTokens",
        ),
        Cel(
            "!has(self.tensorParallelSize) || self.tensorParallelSize == 1 || (has(self.resources) && "
            "has(self.resources.limits) && self.resources.limits.exists(name, name.endsWith('/gpu') "
            "&& string(self.resources.limits[name]) == string(self.tensorParallelSize)))",
            "tensorParallelSize above 1 spreads the model over that many GPUs: resources.limits must ask for as many",
            "tensorParallelSize",
        ),
    )

    runtime: Runtime | None = Field(
        default=None,
        description="Engine software. What each has of the API is in docs/reference/runtimes.md; the rest is refused. "
        "It can be changed only while no engine runs. Default: paceline.",
    )
    image: LongText | None = Field(
        default=None, description="Container image. Default: the operator's setting; none for nim and custom."
    )
    max_model_len: Annotated[int, Field(ge=16, le=MODEL_LEN_MAX)] | None = Field(
        default=None,
        description="Longest prompt plus output, in tokens. Default: what the checkpoint allows.",
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="Sequences that run at once. Default: 64."
    )
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=MODEL_LEN_MAX)] | None = Field(
        default=None, description="Token budget of one step. Default: 2048."
    )
    batching: Batching | None = Field(default=None, description="When a slot is refilled. Default: continuous.")
    prefill_chunk_tokens: Annotated[int, Field(ge=16, le=MODEL_LEN_MAX)] | None = Field(
        default=None, description="Most prompt tokens of one sequence in one step. Default: 512."
    )
    block_size: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None, description="Tokens in one KV block. Default: 16."
    )
    prefix_index: PrefixIndex | None = Field(default=None, description="Index of the prefix cache. Default: hash.")
    enable_prefix_caching: bool | None = Field(default=None, description="Reuse KV of equal prefixes. Default: true.")
    gpu_memory_utilization: GpuShare | None = Field(
        default=None, description="Share of a GPU's memory for weights, activations and KV together. Default: 0.9."
    )
    kv_cache_memory: Quantity | None = Field(
        default=None,
        description="Memory of the paged KV pool, in bytes. Default: what gpuMemoryUtilization leaves of a GPU that "
        "resources.limits asks for, else 256Mi.",
    )
    kv_cache_dtype: KvCacheDtype | None = Field(
        default=None, description="Element type of cached KV; 8 bits on GPUs only. Default: auto, the model's."
    )
    quantization: Quantization | None = Field(
        default=None, description="Weight-only quantisation at load, a little less exact. Default: none."
    )
    tensor_parallel_size: Annotated[int, Field(ge=1, le=8)] | None = Field(
        default=None, description="GPUs of one pod that the model is spread over. Default: 1."
    )
    speculative: Speculative | None = Field(default=None, description="Speculative decoding. Default: none.")
    extra_args: (
        Annotated[list[Argument], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"})] | None
    ) = Field(default=None, description="Appended to the engine's command line, such as --device=simulated.")
    resources: Resources | None = Field(default=None, description="Compute resources of one engine container.")
    pod_template: (
        Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] | None
    ) = Field(
        default=None,
        description="Laid over the engine pods' template: labels, annotations, node selection, priority, pull secrets, "
        "user ids, volumes without Secrets, and of container engine variables, mounts and probes; with runtime custom "
        "also its command, arguments and hooks. Anything else is refused.",
    )

    @model_validator(mode="after")
    def _budget_covers_sequences(self) -> Self:
        budget, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and sequences is not None and budget < sequences:
            raise PydanticCustomError("budget", "{message}", {"message": self.cel[0].message})
        return self

    @property
    def asks_for_gpus(self) -> bool:
        """Whether the container's limits name a GPU, of any vendor."""
        return bool(self._gpus)

    @property
    def _gpus(self) -> list[str]:
        """How many of each vendor the container's limits name, as written."""
        limits = (self.resources.limits if self.resources is not None else None) or {}
        return [count for name, count in limits.items() if name.endswith("/gpu")]

    @model_validator(mode="after")
    def _parallel_on_gpus(self) -> Self:
        size = self.tensor_parallel_size or 1
        if size > 1 and str(size) not in self._gpus:
            raise PydanticCustomError("gpus", "{message}", {"message": self.cel[1].message})
        return self


class RoleSpec(Part):
    """One role of a disaggregated service."""

    replicas: Annotated[int, Field(ge=0, le=1000)] | None = Field(default=None, description="Replicas of the role.")
    engine: EngineSpec | None = Field(default=None, description="Engine settings that differ for the role.")


class RolesSpec(Part):
    """Prefill and decode apart."""

    prefill: RoleSpec = Field(description="Replicas that compute prompts.")
    decode: RoleSpec = Field(description="Replicas that generate.")


class ScalingSpec(Part):
    """Who decides the number of replicas, within which limits."""

    policy: Annotated[ScalingPolicy | None, Built(("none", "external"))] = Field(
        default=None,
        description="none: spec.replicas as written. external: an HPA, KEDA or person writes it through the scale "
        "subresource. Default: none.",
    )
    min_replicas: Annotated[Annotated[int, Field(ge=0, le=1000)] | None, Unbuilt("the goodput autoscaler")] = Field(
        default=None, description="Fewest replicas."
    )
    max_replicas: Annotated[Annotated[int, Field(ge=1, le=1000)] | None, Unbuilt("the goodput autoscaler")] = Field(
        default=None, description="Most replicas."
    )
    headroom_percent: Annotated[Annotated[int, Field(ge=0, le=200)] | None, Unbuilt("the goodput autoscaler")] = Field(
        default=None, description="Capacity held above demand, in percent."
    )
    scale_to_zero_after: Annotated[Duration | None, Unbuilt("the goodput autoscaler")] = Field(
        default=None, description="Idle time before the last replica goes."
    )
    price_per_replica_hour: Annotated[Decimal2 | None, Unbuilt("the goodput autoscaler")] = Field(
        default=None, description="Cost of one replica for one hour, in any one currency."
    )


class CanarySpec(Part):
    """A share of traffic for the newest revision."""

    weight_percent: Annotated[int, Field(ge=0, le=100)] = Field(description="Share of requests, in percent.")


class RoutingSpec(Part):
    """How the router chooses a replica."""

    router_ref: LocalRef | None = Field(
        default=None, description='The Router that serves this model. Default: {name: "default"}.'
    )
    policy: Annotated[RoutingPolicy | None, Built(("leastLoaded", "roundRobin"))] = Field(
        default=None, description="Default: leastLoaded."
    )
    canary: Annotated[CanarySpec | None, Unbuilt("canary releases")] = Field(default=None, description="Canary share.")


class RolloutSpec(Part):
    """How a changed template reaches the replicas."""

    strategy: Annotated[RolloutStrategy | None, Built(("surge", "inPlace"))] = Field(
        default=None,
        description="surge: a new replica is ready before an old one goes. inPlace: an old one goes first, for fleets "
        "without a spare device. Default: surge.",
    )
    drain_timeout: Duration | None = Field(
        default=None, description="Longest wait for requests in flight when a replica goes. Default: 120s."
    )


class InferenceServiceSpec(Part):
    """The desired service."""

    cel: ClassVar[tuple[Cel, ...]] = (
        Cel(
            "!has(self.replicas) || !has(self.scaling) || !has(self.scaling.policy) "
            "|| self.scaling.policy != 'goodput'",
            "replicas has one owner: remove it, or set scaling.policy to none or external",
            "replicas",
        ),
        Cel(
            "!has(self.kvStoreRef) || !has(self.engine) || !has(self.engine.enablePrefixCaching) "
            "|| self.engine.enablePrefixCaching",
            "stored KV comes back through the prefix cache: remove kvStoreRef, or engine.enablePrefixCaching",
            "kvStoreRef",
        ),
    )

    model: ModelSpec = Field(description="Which weights, under which name.")
    engine: EngineSpec | None = Field(default=None, description="The engine that runs the model.")
    roles: Annotated[RolesSpec | None, Unbuilt("disaggregated prefill and decode")] = Field(
        default=None, description="Prefill and decode apart."
    )
    replicas: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        default=None,
        description="Engine replicas, with scaling policy none or external. Set it where kubectl scale or an HPA is to "
        "address it. Default: 1.",
    )
    scaling: ScalingSpec | None = Field(default=None, description="Who decides the number of replicas.")
    slo: Slo | None = Field(default=None, description="Latency promise for tenants that have none of their own.")
    routing: RoutingSpec | None = Field(default=None, description="How the router chooses a replica.")
    kv_store_ref: LocalRef | None = Field(default=None, description="The KVStore that the engines use.")
    rollout: RolloutSpec | None = Field(default=None, description="How a changed template reaches the replicas.")

    @model_validator(mode="after")
    def _store_has_a_cache(self) -> Self:
        if self.kv_store_ref and self.engine and self.engine.enable_prefix_caching is False:
            raise PydanticCustomError("store", "{message}", {"message": self.cel[1].message})
        return self


class ModelStatus(Part):
    """What is served."""

    served_name: str | None = Field(default=None, description="Name that clients put into `model`.")
    source: str | None = Field(default=None, description="Source of the weights.")


class EndpointStatus(Part):
    """Where one role of the service answers."""

    role: Text = Field(description="engine, prefill or decode.")
    service: ObjectName = Field(description="Service whose EndpointSlices list the replicas.")
    ready: Annotated[int, Field(ge=0)] = Field(description="Endpoints that would serve a request now.")


class ScalingDecision(Part):
    """One decision of the autoscaler with its inputs."""

    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    from_replicas: Annotated[int, Field(ge=0)]
    to_replicas: Annotated[int, Field(ge=0)]
    reason: Text
    message: LongText | None = None


class InferenceServiceStatus(BaseStatus):
    """The observed service."""

    replicas: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Engine pods that exist.")
    ready_replicas: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Engine pods that are ready.")
    selector: LongText | None = Field(default=None, description="Label selector of the engine pods, for autoscalers.")
    url: LongText | None = Field(default=None, description="OpenAI-compatible base URL.")
    model: ModelStatus | None = Field(default=None, description="What is served.")
    endpoints: (
        Annotated[
            list[EndpointStatus],
            Field(
                max_length=4,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["role"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Where the service answers, per role.")
    scaling_decisions: (
        Annotated[
            list[ScalingDecision],
            Field(max_length=10, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
        ]
        | None
    ) = Field(default=None, description="The last decisions, newest first.")


class InferenceService(Resource):
    """A model served by a fleet of engine replicas behind the namespace's router."""

    naming = Naming("InferenceService", "inferenceservices", "inferenceservice", "pisvc")
    scale = True
    columns = (
        Column("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether it serves."),
        Column("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why."),
        Column("Replicas", "integer", ".status.readyReplicas", "Engine replicas that are ready."),
        Column("Desired", "integer", ".spec.replicas", "Engine replicas asked for."),
        Column("Model", "string", ".status.model.servedName", "Name that clients use."),
        Column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
        Column("URL", "string", ".status.url", "OpenAI-compatible base URL.", 1),
        Column("Source", "string", ".spec.model.source", "Where the weights come from.", 1),
    )

    spec: InferenceServiceSpec
    status: InferenceServiceStatus | None = None

    def served_name(self) -> str:
        """Name that clients put into `model`."""
        return self.spec.model.served_name or self.metadata.name
