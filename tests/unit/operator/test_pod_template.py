"""podTemplate: what it changes, and that it gives nobody more than a restricted pod has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_samples import NOW, SETTINGS, applied, condition, live, observed, service

from paceline_operator.planner.plan import plan

IMAGE = {"runtime": "custom", "image": "a:1"}


def planned(template: dict[str, Any], **engine: Any):
    wanted = service("chat", model={"source": "file:///m"}, engine={**engine, "podTemplate": template})
    return plan(observed(wanted), NOW, SETTINGS)


def pod(template: dict[str, Any], **engine: Any) -> dict[str, Any]:
    return applied(planned(template, **engine).actions)["Deployment"]["spec"]["template"]


def engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def test_it_is_laid_over_our_own_engines_pod_and_ours_stays() -> None:
    plain = pod({})
    changed = pod(
        {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "priorityClassName": "high",
                "imagePullSecrets": [{"name": "registry"}],
                "volumes": [{"name": "extra", "configMap": {"name": "c"}}],
                "containers": [
                    {
                        "name": "engine",
                        "env": [{"name": "OMP_NUM_THREADS", "value": "2"}, {"name": "HOME", "value": "/extra"}],
                        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                        "securityContext": {"readOnlyRootFilesystem": False},
                    }
                ],
            },
        }
    )
    assert changed["metadata"]["labels"] == {"team": "a", **plain["metadata"]["labels"]}
    assert changed["metadata"]["annotations"]["note"] == "b"
    assert changed["spec"]["priorityClassName"] == "high"
    before, after = plain["spec"]["containers"][0], changed["spec"]["containers"][0]
    assert after["args"] == before["args"]
    assert after["volumeMounts"][: len(before["volumeMounts"])] == before["volumeMounts"]
    assert after["securityContext"] == {**before["securityContext"], "readOnlyRootFilesystem": False}
    names = [item["name"] for item in after["env"]]
    assert len(names) == len(set(names))
    assert {"name": "HOME", "value": "/extra"} in after["env"]


def test_labels_of_ours_win_and_no_selector_changes() -> None:
    refused = condition(planned({"metadata": {"labels": {"paceline.dev/role": "x"}}}), "Stalled")
    assert refused is not None and "paceline.dev/role" in refused["message"]
    changed = applied(planned({"metadata": {"labels": {"team": "a"}}}).actions)["Deployment"]
    assert "team" not in changed["spec"]["selector"]["matchLabels"]


def test_containers_before_the_engine_get_its_mounts_but_not_its_probes() -> None:
    template = engine(
        startupProbe={"httpGet": {"path": "/x", "port": "http"}}, env=[{"name": "HTTPS_PROXY", "value": "p"}]
    )
    wanted = service("chat", model={"source": "file:///m.gguf"}, engine={"runtime": "ollama", "podTemplate": template})
    spec = applied(plan(observed(wanted), NOW, SETTINGS).actions)["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "HTTPS_PROXY", "value": "p"} in spec["initContainers"][0]["env"]
    assert "startupProbe" not in spec["initContainers"][0]
    assert spec["containers"][0]["startupProbe"]["httpGet"]["path"] == "/x"


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": {"hostNetwork": True}}, ".spec.hostNetwork"),
        ({"spec": {"hostPID": True}}, ".spec.hostPID"),
        ({"spec": {"hostIPC": True}}, ".spec.hostIPC"),
        ({"spec": {"serviceAccountName": "admin"}}, ".spec.serviceAccountName"),
        ({"spec": {"automountServiceAccountToken": True}}, ".spec.automountServiceAccountToken"),
        ({"spec": {"nodeName": "n"}}, ".spec.nodeName"),
        ({"spec": {"terminationGracePeriodSeconds": 0}}, ".spec.terminationGracePeriodSeconds"),
        ({"spec": {"initContainers": [{"name": "x"}]}}, ".spec.initContainers"),
        ({"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}, ".spec.volumes[0].hostPath"),
        ({"spec": {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}}, ".spec.volumes[0].secret"),
        ({"spec": {"volumes": [{"name": "v", "projected": {}}]}}, ".spec.volumes[0].projected"),
        ({"spec": {"volumes": [{"name": "v", "csi": {}}]}}, ".spec.volumes[0].csi"),
        ({"spec": {"volumes": [{"name": "internal-token", "emptyDir": {}}]}}, ".spec.volumes[0].name"),
        ({"spec": {"volumes": [{"name": "kv-store-keys", "emptyDir": {}}]}}, ".spec.volumes[0].name"),
        ({"spec": {"securityContext": {"runAsUser": 0}}}, ".spec.securityContext.runAsUser"),
        ({"spec": {"securityContext": {"runAsNonRoot": False}}}, ".spec.securityContext.runAsNonRoot"),
        ({"spec": {"containers": [{"name": "sidecar"}]}}, ".spec.containers[0].name"),
        ({"spec": {"containers": [{"name": "engine"}, {"name": "b"}]}}, ".spec.containers[1]"),
        (engine(image="b"), ".spec.containers[0].image"),
        (engine(ports=[]), ".spec.containers[0].ports"),
        (engine(securityContext={"privileged": True}), ".spec.containers[0].securityContext.privileged"),
        (engine(securityContext={"capabilities": {}}), ".spec.containers[0].securityContext.capabilities"),
        (engine(env=[{"name": "PACELINE_HOST", "value": "x"}]), ".spec.containers[0].env[0].name"),
        (
            engine(env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
            ".spec.containers[0].env[0].valueFrom.secretKeyRef",
        ),
        (engine(envFrom=[{"secretRef": {"name": "s"}}]), ".spec.containers[0].envFrom[0].secretRef"),
        (engine(volumeMounts=[{"name": "internal-token", "mountPath": "/x"}]), ".spec.containers[0].volumeMounts[0]"),
        (engine(readinessProbe={"httpGet": {"port": 1, "host": "10.0.0.1"}}), ".spec.containers[0].readinessProbe"),
        (engine(readinessProbe={"httpGet": "x"}), ""),
        ({"spec": {"volumes": {"a": 1}}}, ""),
        ({"spec": []}, ""),
        ({"kind": "Pod"}, ".kind"),
    ],
)
def test_what_would_give_more_is_refused_by_name(template: dict[str, Any], field: str) -> None:
    for runtime in ({}, IMAGE):
        refused = planned(template, **runtime)
        stalled = condition(refused, "Stalled")
        assert stalled is not None
        assert stalled["reason"] == "PodTemplateRefused"
        assert stalled["message"].startswith(f"spec.engine.podTemplate{field}"), stalled["message"]
        assert refused.actions == ()


def test_only_the_custom_runtime_brings_a_command() -> None:
    template = engine(command=["/server"], args=["a"], lifecycle={"preStop": {"sleep": {"seconds": 1}}})
    refused = condition(planned(template), "Stalled")
    assert refused is not None and refused["message"].endswith("not allowed here; runtime custom may set it")
    container = pod(template, **IMAGE)["spec"]["containers"][0]
    assert (container["command"], container["args"]) == (["/server"], ["a"])
    assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": 1}}}


def test_defaults_that_the_api_server_fills_in_are_nobodys_addition() -> None:
    template = engine(
        env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        readinessProbe={"httpGet": {"path": "/r", "port": "http"}},
    )
    wanted = service("chat", model={"source": "file:///m"}, engine={**IMAGE, "podTemplate": template})
    made = live(applied(plan(observed(wanted), NOW, SETTINGS).actions).values())
    container = next(item for item in made if item["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]
    container["readinessProbe"] |= {"timeoutSeconds": 1, "periodSeconds": 10, "failureThreshold": 3}
    container["readinessProbe"]["successThreshold"] = 1
    container["readinessProbe"]["httpGet"]["scheme"] = "HTTP"
    next(item for item in container["env"] if item["name"] == "IP")["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
    assert plan(observed(wanted, children=made), NOW, SETTINGS).actions == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["engine", "a", "/", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "labels", "spec", "containers", "name", "env", "volumes", "securityContext", "emptyDir",
                 "volumeMounts", "mountPath", "runAsUser", "lifecycle", "preStop", "exec", "hostPath", "envFrom"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["metadata", "spec"]), JSON, max_size=2), st.sampled_from([{}, IMAGE]))
def test_no_template_makes_the_planner_stumble_or_loosens_the_pod(template, runtime) -> None:
    made = planned(template, **runtime)
    if condition(made, "Stalled") is not None:
        assert made.actions == ()
        return
    spec = applied(made.actions)["Deployment"]["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "chat-engine"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert [container["name"] for container in spec["containers"]] == ["engine"]
    assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
