"""Other engine software: what each becomes, what each refuses, and that no spec makes the planner stumble.

After a change on purpose: PACELINE_UPDATE_GOLDEN=1 python -m pytest tests/unit/operator/test_runtimes.py
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_flags import DOCUMENTED
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_samples import NOW, SETTINGS, applied, condition, live, observed, rolled_out, service

from paceline_api.runtimes import RUNTIMES
from paceline_api.v1alpha1.inference_service import Runtime
from paceline_api.validation import InvalidObject, parse
from paceline_operator.planner.manifests import covers
from paceline_operator.planner.model import PodFact
from paceline_operator.planner.plan import plan
from paceline_operator.planner.runtimes.pod import ENDPOINT_LAG_S, drain_command
from paceline_operator.planner.runtimes.registry import FOREIGN
from paceline_operator.planner.spec_problem import spec_problem

GOLDEN = Path(__file__).parent / "golden" / "runtimes"
GPU = {"limits": {"nvidia.com/gpu": 1}}
GPUS = {"limits": {"nvidia.com/gpu": 2}}
HUB, GGUF = "hf://org/name", "hf://org/name/file.gguf"
# One spec a runtime that uses everything that it has.
FULL: dict[str, dict[str, Any]] = {
    "vllm": {
        "model": {"source": f"{HUB}@abc", "chatTemplate": "{{ x }}", "credentialsSecretRef": {"name": "hub"}},
        "engine": {
            "maxModelLen": 4096, "maxNumSeqs": 32, "maxNumBatchedTokens": 4096, "prefillChunkTokens": 512,
            "blockSize": 16, "prefixIndex": "hash", "enablePrefixCaching": True, "gpuMemoryUtilization": "0.85",
            "kvCacheMemory": "2Gi", "kvCacheDtype": "fp8", "tensorParallelSize": 2, "resources": GPUS,
            "speculative": {"method": "draft", "draftSource": "hf://org/draft", "numTokens": "5"},
            "extraArgs": ["--enforce-eager"],
        },
    },
    "sglang": {
        "model": {"source": "pvc://weights/chat", "chatTemplate": "{{ x }}"},
        "engine": {
            "maxModelLen": 4096, "maxNumSeqs": 32, "maxNumBatchedTokens": 4096, "blockSize": 64,
            "prefixIndex": "radix", "enablePrefixCaching": False, "gpuMemoryUtilization": "0.85",
            "kvCacheDtype": "fp8", "tensorParallelSize": 2, "resources": GPUS,
            "speculative": {"method": "draft", "draftSource": "hf://org/draft", "numTokens": "5"},
        },
    },
    "llamacpp": {
        "model": {"source": GGUF, "servedName": "chat-small", "chatTemplate": "{{ x }}"},
        "engine": {
            "maxModelLen": 4096, "maxNumSeqs": 8, "maxNumBatchedTokens": 512, "enablePrefixCaching": False,
            "kvCacheDtype": "int8", "speculative": {"method": "ngram", "numTokens": "8"},
            "extraArgs": ["--threads", "2"],
        },
    },
    "ollama": {
        "model": {"source": GGUF},
        "engine": {"maxModelLen": 4096, "maxNumSeqs": 8, "enablePrefixCaching": True, "kvCacheDtype": "int8"},
    },
    "trtllm": {
        "model": {"source": HUB, "revision": "abc", "chatTemplate": "{{ x }}"},
        "engine": {
            "maxModelLen": 4096, "maxNumSeqs": 32, "maxNumBatchedTokens": 4096, "enablePrefixCaching": True,
            "tensorParallelSize": 2, "resources": GPUS,
        },
    },
    "tritonserver": {
        "model": {"source": "pvc://repository/models"},
        "engine": {"resources": GPU, "extraArgs": ["--tokenizer=org/name"]},
    },
    "nim": {
        "model": {"source": "image://llama", "credentialsSecretRef": {"name": "ngc"}},
        "engine": {"image": "nvcr.io/nim/meta/llama:2.0.1", "maxModelLen": 4096, "resources": GPU},
    },
    "custom": {
        "model": {"source": "pvc://weights/chat"},
        "engine": {
            "image": "registry.example/server:1",
            "extraArgs": ["--verbose"],
            "podTemplate": {
                "metadata": {"labels": {"team": "a"}},
                "spec": {
                    "nodeSelector": {"pool": "gpu"},
                    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                    "securityContext": {"runAsUser": 1000},
                    "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
                    "containers": [
                        {
                            "name": "engine",
                            "command": ["/server"],
                            "env": [{"name": "LEVEL", "value": "debug"}],
                            "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                            "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}},
                        }
                    ],
                },
            },
        },
    },
}  # fmt: skip


def manifest(runtime: str, **spec: Any) -> dict[str, Any]:
    body = {**FULL[runtime], **spec}
    return service("chat", **{**body, "engine": {"runtime": runtime, **body["engine"]}})


def children(wanted: dict[str, Any], **fields: Any) -> dict[str, dict[str, Any]]:
    return applied(plan(observed(wanted, **fields), NOW, SETTINGS).actions)


def container(wanted: dict[str, Any]) -> dict[str, Any]:
    return children(wanted)["Deployment"]["spec"]["template"]["spec"]["containers"][0]


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def test_every_runtime_of_the_api_is_built_and_known_to_routers() -> None:
    assert {"paceline", *FOREIGN} == set(Runtime) == set(RUNTIMES)


@pytest.mark.parametrize("runtime", FULL)
def test_a_runtime_renders_as_recorded(runtime: str) -> None:
    rendered = list(children(manifest(runtime)).values())
    text = yaml.dump_all(rendered, Dumper=_NoAliases, sort_keys=False, width=120)
    path = GOLDEN / f"{runtime}.yaml"
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; see this file's docstring if the change is meant"


@pytest.mark.parametrize("runtime", FULL)
def test_every_flag_is_documented_for_the_release_that_is_named(runtime: str) -> None:
    release, documented = DOCUMENTED[runtime]
    assert release == FOREIGN[Runtime(runtime)].release
    own = set(FULL[runtime]["engine"].get("extraArgs", ()))
    words = [word for word in container(manifest(runtime)).get("args", ()) if word not in own]
    used = {word.split("=", 1)[0] for word in words if word.startswith("--")}
    assert used <= documented, f"not documented for {runtime} {release}: {sorted(used - documented)}"
    variables = {item["name"] for item in container(manifest(runtime))["env"]}
    prefix = {"ollama": "OLLAMA_", "nim": "NIM_"}.get(runtime)
    assert prefix is None or {name for name in variables if name.startswith(prefix)} <= documented


@pytest.mark.parametrize("runtime", FULL)
def test_the_pods_are_restricted_and_ask_for_nothing_of_the_node(runtime: str) -> None:
    spec = children(manifest(runtime))["Deployment"]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in [*spec["containers"], *spec.get("initContainers", ())]:
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "hostPath" not in str(spec)
    assert spec["terminationGracePeriodSeconds"] > 120


@pytest.mark.parametrize("runtime", FULL)
def test_only_engines_that_ask_for_the_token_get_it(runtime: str) -> None:
    template = children(manifest(runtime))["Deployment"]["spec"]["template"]["spec"]
    assert ("paceline-internal" in str(template)) is RUNTIMES[runtime].checks_token


ENGINES = st.fixed_dictionaries(
    {},
    optional={
        "image": st.sampled_from(["a:1", "b:0.9.1"]),
        "maxModelLen": st.integers(16, 4096),
        "maxNumSeqs": st.integers(1, 16),
        "maxNumBatchedTokens": st.integers(16, 4096),
        "batching": st.sampled_from(["static", "continuous"]),
        "prefillChunkTokens": st.integers(16, 512),
        "blockSize": st.sampled_from([1, 16, 64]),
        "prefixIndex": st.sampled_from(["hash", "radix"]),
        "enablePrefixCaching": st.booleans(),
        "gpuMemoryUtilization": st.just("0.8"),
        "kvCacheMemory": st.just("1Gi"),
        "kvCacheDtype": st.sampled_from(["auto", "fp8", "int8"]),
        "quantization": st.sampled_from(["none", "int8"]),
        "tensorParallelSize": st.sampled_from([1, 2]),
        "speculative": st.sampled_from(
            [
                {"method": "none"},
                {"method": "ngram"},
                {"method": "ngram", "numTokens": "auto"},
                {"method": "selfDraft"},
                {"method": "draft", "draftSource": "file:///draft.gguf", "numTokens": "3"},
                {"method": "draft", "draftSource": "hf://org/draft", "acceptance": "lenient"},
            ]
        ),
        "extraArgs": st.sampled_from([["--x=1"], ["--port=1"], ["--threads", "2"], ["$(HOME)"]]),
        "resources": st.sampled_from([GPUS, {"requests": {"cpu": "1"}}]),
        "podTemplate": st.sampled_from([{}, {"spec": {"nodeSelector": {"a": "b"}}}, {"spec": {"hostNetwork": True}}]),
    },
)
MODELS = st.fixed_dictionaries(
    {
        "source": st.sampled_from(
            [HUB, GGUF, f"{HUB}@v1", "s3://bucket/prefix", "s3://bucket/x.gguf", "pvc://claim/x.gguf", "pvc://claim/x",
             "file:///models/x", "file:///models/x.gguf", "package://p/x.gguf", "image://llama"]
        )
    },
    optional={"chatTemplate": st.just("{{ x }}"), "servedName": st.sampled_from(["Org/Name.v1", "a:b:c"])},
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(list(Runtime)), MODELS, ENGINES, st.booleans())
def test_every_combination_is_rendered_or_refused_with_a_field(runtime, model, engine, with_store) -> None:
    spec: dict[str, Any] = {"model": model, "engine": {**engine, "runtime": str(runtime)}}
    if with_store:
        spec["kvStoreRef"] = {"name": "shared"}
    wanted = service("chat", **spec)
    first = plan(observed(wanted), NOW, SETTINGS)
    stalled = condition(first, "Stalled")
    if stalled is not None:
        assert first.actions == ()
        assert stalled["reason"] in ("InvalidSpec", "RuntimeUnsupported", "PodTemplateRefused")
        assert re.match(r"spec(\.[A-Za-z]+(\[\d+\])?)*: .", stalled["message"]), stalled["message"]
        return
    assert not with_store or runtime is Runtime.PACELINE
    if with_store:
        return  # Waits for its KVStore.
    made = applied(first.actions)
    again = plan(observed(wanted, children=live(made.values())), NOW, SETTINGS)
    assert again.actions == ()
    assert all(covers(item, made[kind]) for kind, item in made.items())


@pytest.mark.parametrize(
    ("runtime", "change", "field", "words"),
    [
        (
            "vllm",
            {"engine": {"quantization": "int4"}},
            "spec.engine.quantization",
            "only none; use runtime paceline, or remove the field",
        ),
        ("vllm", {"engine": {"batching": "static"}}, "spec.engine.batching", "use runtime paceline, or"),
        (
            "vllm",
            {"engine": {"prefixIndex": "radix"}},
            "spec.engine.prefixIndex",
            "only hash; use runtime paceline or sglang, or",
        ),
        ("vllm", {"model": {"source": GGUF}}, "spec.model.source", "a .gguf file from hf://; use runtime paceline, ll"),
        ("vllm", {"model": {"source": "package://p/x.gguf"}}, "spec.model.source", "use runtime paceline"),
        ("vllm", {"kvStoreRef": {"name": "s"}}, "spec.kvStoreRef", "vllm has no kvStoreRef; use runtime paceline,"),
        (
            "vllm",
            {"engine": {"speculative": {"method": "ngram", "numTokens": "auto"}}},
            "spec.engine.speculative.numTokens",
            "has no 'auto', only 1 to 32; use",
        ),
        ("vllm", {"engine": {"blockSize": 8}}, "spec.engine.blockSize", "has no 8, only 16, 32, 64, 128; use"),
        ("vllm", {"engine": {"extraArgs": ["--api-key=x"]}}, "spec.engine.extraArgs[0]", "set by the operator"),
        ("sglang", {"engine": {}}, "spec.engine.resources.limits", "sglang runs on GPUs only"),
        (
            "sglang",
            {"engine": {"kvCacheMemory": "1Gi"}},
            "spec.engine.kvCacheMemory",
            "use runtime paceline, vllm or nim, or",
        ),
        (
            "llamacpp",
            {"model": {"source": HUB}},
            "spec.model.source",
            "a Hugging Face folder from hf://; use runtime pac",
        ),
        ("llamacpp", {"model": {"source": GGUF, "revision": "v1"}}, "spec.model.revision", "has no revision"),
        (
            "llamacpp",
            {"engine": {"blockSize": 16}},
            "spec.engine.blockSize",
            "use runtime paceline, vllm, sglang or nim, or",
        ),
        ("ollama", {"engine": {"extraArgs": ["--x=1"]}}, "spec.engine.extraArgs", "has no options"),
        ("ollama", {"model": {"source": GGUF, "chatTemplate": "x"}}, "spec.model.chatTemplate", "or custom, or"),
        ("ollama", {"model": {"source": GGUF, "servedName": "a:b:c"}}, "spec.model.servedName", "NAME:TAG"),
        ("trtllm", {"engine": {"image": "x/release:0.21.0", "resources": GPU}}, "spec.engine.image", "1.0 or later"),
        ("tritonserver", {"engine": {"maxNumSeqs": 4}}, "spec.engine.maxNumSeqs", "has no maxNumSeqs"),
        ("nim", {"engine": {"resources": GPU}}, "spec.engine.image", "no image of its own"),
        ("custom", {"engine": {}}, "spec.engine.image", "no image of its own"),
    ],
)
def test_what_a_runtime_lacks_is_stalled_with_the_field_and_who_can(runtime, change, field, words) -> None:
    wanted = manifest(runtime, **change)
    stalled = condition(plan(observed(wanted), NOW, SETTINGS), "Stalled")
    assert stalled is not None
    assert stalled["reason"] == "RuntimeUnsupported"
    assert stalled["message"].startswith(f"{field}: "), stalled["message"]
    assert words in stalled["message"]


def test_our_own_engine_does_not_load_an_images_model() -> None:
    stalled = condition(plan(observed(service(model={"source": "image://llama"})), NOW, SETTINGS), "Stalled")
    assert stalled is not None
    assert "use runtime nim or custom" in stalled["message"]


def test_a_runtime_cannot_change_under_running_engines() -> None:
    before = service("chat", model={"source": "file:///m.gguf"})
    made = rolled_out(live(children(before).values()))
    after = service("chat", model={"source": "file:///m.gguf"}, engine={"runtime": "llamacpp"})
    refused = plan(observed(after, children=made, pods=(PodFact("p0", "x", True),)), NOW, SETTINGS)
    stalled = condition(refused, "Stalled")
    assert stalled is not None and stalled["reason"] == "RuntimeChanged"
    assert refused.actions == ()
    idle = plan(observed(after, children=made), NOW, SETTINGS)
    assert condition(idle, "Stalled") is None
    assert applied(idle.actions)["Service"]["metadata"]["labels"]["paceline.dev/runtime"] == "llamacpp"


def test_a_users_text_is_never_expanded() -> None:
    wanted = manifest("llamacpp", model={"source": "file:///m/$(HOME).gguf"})
    assert "/m/$$(HOME).gguf" in container(wanted)["args"]


@pytest.mark.parametrize("name", ["vllm", "llamacpp"])
def test_the_example_is_valid_and_is_rendered(name: str) -> None:
    path = Path(__file__).parents[3] / "manifests" / "examples" / f"{name}.yaml"
    parsed = [parse(item) for item in yaml.safe_load_all(path.read_text())]
    services = [item for item in parsed if item.kind == "InferenceService"]
    assert [spec_problem(item) for item in services] == [None]  # pyright: ignore[reportArgumentType]


def test_a_runtime_that_does_not_exist_is_refused_by_the_schema() -> None:
    with pytest.raises(InvalidObject, match="tritonserver"):
        parse(service("chat", engine={"runtime": "tgi"}))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net")
def test_the_drain_waits_as_long_as_a_client_is_connected_and_no_longer_than_it_may(tmp_path: Path) -> None:
    naps = tmp_path / "naps"
    (tmp_path / "sleep").write_text(f"#!/bin/sh\necho nap >> {naps}\n")
    (tmp_path / "sleep").chmod(0o755)

    def naps_of_a_drain(port: int) -> int:
        naps.write_text("")
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PACELINE_PORT_HTTP": str(port)}
        subprocess.run(drain_command(20), env=environ, check=True, timeout=60)
        return len(naps.read_text().splitlines())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert naps_of_a_drain(port) == 1, "routers are given time to hear of it"
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            assert naps_of_a_drain(port) == 1 + 20 - ENDPOINT_LAG_S
            # A connection from this port to elsewhere is not one to the engine.
            with socket.create_server(("127.0.0.1", 0)) as other:
                assert naps_of_a_drain(other.getsockname()[1]) == 1
        assert naps_of_a_drain(port) == 1
