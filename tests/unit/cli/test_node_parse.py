"""A Pod is understood whole or refused with the path of the field that is not honoured."""

import copy

import pytest

from paceline_cli.node.parse import parse_pod
from paceline_cli.node.pod import Exec, HttpGet, PodRefused

POD = {
    "metadata": {"name": "web", "namespace": "prod", "uid": "u1", "labels": {"app": "web"}},
    "spec": {
        "enableServiceLinks": False,
        "nodeName": "n1",
        "schedulerName": "default-scheduler",
        "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}],
        "dnsPolicy": "ClusterFirst",
        "restartPolicy": "Always",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 2000},
        "terminationGracePeriodSeconds": 150,
        "volumes": [
            {"name": "cache", "emptyDir": {}},
            {"name": "conf", "configMap": {"name": "c", "defaultMode": 420}},
        ],
        "containers": [
            {
                "name": "main",
                "image": "ghcr.io/x/y",
                "imagePullPolicy": "IfNotPresent",
                "command": ["serve"],
                "args": ["--port", "$(PACELINE_PORT_HTTP)"],
                "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
                "env": [{"name": "IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}],
                "volumeMounts": [{"name": "cache", "mountPath": "/var/cache/paceline/"}],
                "readinessProbe": {"httpGet": {"path": "/ready", "port": "http", "scheme": "HTTP"}, "periodSeconds": 2},
                "lifecycle": {"preStop": {"exec": {"command": ["drain"]}}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "runAsUser": 1001,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "resources": {"limits": {"cpu": 2, "memory": "1Gi"}},
                "terminationMessagePath": "/dev/termination-log",
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
    },
}


def test_a_pod_as_the_api_server_defaults_it_is_understood() -> None:
    pod = parse_pod(POD)
    main = pod.containers[0]
    assert (pod.key, pod.grace, pod.fs_group) == (("prod", "web"), 150, 2000)
    assert main.readiness is not None
    assert main.readiness.action == HttpGet("http", "/ready")
    assert (main.readiness.period, main.readiness.failure_threshold) == (2, 3)
    assert main.pre_stop == Exec(("drain",))
    assert main.mounts[0].mount_path == "/var/cache/paceline"
    assert main.limits == {"cpu": "2", "memory": "1Gi"}
    # A container's own value wins, the rest comes from the Pod.
    assert (main.security.run_as_user, main.security.run_as_non_root) == (1001, True)
    assert main.log_tail_on_error


def test_a_claim_of_the_pods_own_is_a_folder_with_its_size_as_limit() -> None:
    manifest = copy.deepcopy(POD)
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "volumeMode": "Filesystem",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    manifest["spec"]["volumes"].append({"name": "kv", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}})
    volume = parse_pod(manifest).volumes[-1]
    assert (volume.name, volume.kind, volume.size_limit) == ("kv", "emptyDir", "1Gi")
    spec["volumeMode"] = "Block"
    with pytest.raises(PodRefused, match=r"ephemeral\.volumeClaimTemplate\.spec\.volumeMode"):
        parse_pod(manifest)


@pytest.mark.parametrize(
    ("where", "value", "path"),
    [
        (["spec", "hostNetwork"], True, "spec.hostNetwork"),
        (["spec", "enableServiceLinks"], None, "spec.enableServiceLinks"),
        (["spec", "hostAliases"], [{"ip": "1.2.3.4"}], "spec.hostAliases"),
        (["spec", "volumes", 0], {"name": "cache", "hostPath": {"path": "/"}}, "spec.volumes[0].hostPath"),
        (["spec", "volumes", 0], {"name": "cache", "nfs": {"server": "x"}}, "spec.volumes[0].nfs"),
        (["spec", "containers", 0, "tty"], True, "spec.containers[0].tty"),
        (["spec", "containers", 0, "command"], None, "spec.containers[0].command"),
        (
            ["spec", "containers", 0, "securityContext", "privileged"],
            True,
            "spec.containers[0].securityContext.privileged",
        ),
        (
            ["spec", "containers", 0, "securityContext", "capabilities", "add"],
            ["NET_ADMIN"],
            "spec.containers[0].securityContext.capabilities.add",
        ),
        (["spec", "containers", 0, "readinessProbe"], {"grpc": {"port": 1}}, "spec.containers[0].readinessProbe"),
        (
            ["spec", "containers", 0, "readinessProbe", "periodSeconds"],
            "2",
            "spec.containers[0].readinessProbe.periodSeconds",
        ),
        (
            ["spec", "containers", 0, "lifecycle", "postStart"],
            {"exec": {"command": ["x"]}},
            "spec.containers[0].lifecycle.postStart",
        ),
        (["spec", "containers", 0, "ports", 0, "hostPort"], 80, "spec.containers[0].ports[0].hostPort"),
        (["spec", "containers", 0, "volumeMounts", 0, "name"], "nope", "spec.containers[0].volumeMounts[0].name"),
        (["spec", "containers", 0, "volumeMounts", 0, "subPath"], "../x", "spec.containers[0].volumeMounts[0].subPath"),
        (
            ["spec", "initContainers"],
            [{"name": "i", "restartPolicy": "Always"}],
            "spec.initContainers[0].restartPolicy",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_with_its_path(where: list, value: object, path: str) -> None:
    manifest = copy.deepcopy(POD)
    target = manifest
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    with pytest.raises(PodRefused) as refused:
        parse_pod(manifest)
    assert refused.value.path == path
    assert str(refused.value).startswith(path)


def test_the_token_volume_of_a_real_api_server_is_understood() -> None:
    manifest = copy.deepcopy(POD)
    manifest["spec"]["volumes"].append(
        {
            "name": "kube-api-access-x",
            "projected": {
                "defaultMode": 420,
                "sources": [
                    {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                    {
                        "downwardAPI": {
                            "items": [
                                {
                                    "path": "namespace",
                                    "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"},
                                }
                            ]
                        }
                    },
                ],
            },
        }
    )
    volume = parse_pod(manifest).volumes[-1]
    assert [s.kind for s in volume.sources] == ["serviceAccountToken", "configMap", "downwardAPI"]
