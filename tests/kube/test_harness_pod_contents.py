"""What a container sees and may do on the harness's node: environment, volumes, identity, rights, refusals."""

from __future__ import annotations

import json
import os

import pytest
from control_plane import wait_until
from kube_manifests import RESTRICTED, apply, container, get, pod, wait_log
from network_namespace import BRIDGE_IP

pytestmark = pytest.mark.kube

DONE = "--done--"


def run(kubectl, node, namespace: str, program: str, name: str = "probe", **fields) -> str:
    """Output of a Python program run to its end in a Pod; `spec` keys go to the Pod, the rest to the container."""
    spec = fields.pop("spec", {})
    main = container(["python", "-c", f"{program}\nprint('{DONE}', flush=True)"], **fields)
    apply(kubectl, namespace, pod(name, main, restartPolicy="Never", **spec))
    return wait_log(node, namespace, name, DONE).replace(DONE, "")


def test_environment_from_every_source(node, kubectl, namespace):
    apply(
        kubectl,
        namespace,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"level": "high"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"key": "k-1"}},
    )
    env = [
        {"name": "PLAIN", "value": "1"},
        {"name": "EXPANDED", "value": "$(PLAIN)-$(POD_IP)"},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "level"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
    ]
    limits = {"limits": {"cpu": "2", "memory": "64Mi"}}
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = json.loads(run(kubectl, node, namespace, program, env=env, resources=limits))
    address = get(kubectl, namespace, "pod", "probe")["status"]["podIP"]
    wanted = {"PLAIN": "1", "POD_IP": address, "POD_NAME": "probe", "CPUS": "2", "LEVEL": "high", "KEY": "k-1"}
    assert {name: seen.get(name) for name in wanted} == wanted
    assert seen["EXPANDED"].startswith("1-")
    assert (seen["KUBERNETES_SERVICE_HOST"], seen["KUBERNETES_SERVICE_PORT"]) == (BRIDGE_IP, "6443")
    leaked = set(os.environ) & set(seen) - {"PATH", "HOME", "LANG"}
    assert not leaked, "the node's own environment must not reach a container"


def test_volumes_of_every_kind(node, kubectl, namespace):
    apply(
        kubectl,
        namespace,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "1", "b": "2"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"token": "s-1"}},
    )
    label = {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}
    volumes = [
        {"name": "cm", "configMap": {"name": "settings", "items": [{"key": "a", "path": "sub/a"}]}},
        {"name": "secret", "secret": {"secretName": "keys", "defaultMode": 0o440}},
        {"name": "down", "downwardAPI": {"items": [label]}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
    ]
    mounts = [{"name": v["name"], "mountPath": f"/volumes/{v['name']}"} for v in volumes]
    mounts[0]["readOnly"] = True
    program = """
import json, os
def read(path): return open(f"/volumes/{path}").read()
def write(path):
    try: open(f"/volumes/{path}/new", "w").write("x"); return "written"
    except OSError as error: return error.strerror
size = os.statvfs("/volumes/memory")
print(json.dumps({
    "cm": read("cm/sub/a"), "secret": read("secret/token"), "labels": read("down/labels"),
    "cm-write": write("cm"), "scratch-write": write("scratch"), "memory-write": write("memory"),
    "root-write": write("../tmp"), "memory-bytes": size.f_blocks * size.f_frsize,
}))"""
    spec = {"volumes": volumes, "securityContext": {"fsGroup": 65532}}
    seen = json.loads(run(kubectl, node, namespace, program, volumeMounts=mounts, spec=spec))
    assert (seen["cm"], seen["secret"]) == ("1", "s-1")
    assert seen["cm-write"] == seen["root-write"] == "Read-only file system"
    assert seen["scratch-write"] == seen["memory-write"] == "written"
    assert seen["memory-bytes"] == 8 * 2**20


def test_restricted_rights_hold(node, kubectl, namespace):
    program = """
import json, os, subprocess
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
def refused(*command): return subprocess.run(command, capture_output=True).returncode != 0
print(json.dumps({
    "uid": status["Uid"].split(), "gid": status["Gid"].split(), "groups": status["Groups"].split(),
    "caps": [status[f"Cap{kind}"].strip() for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")],
    "no_new_privs": status["NoNewPrivs"].strip(), "seccomp": status["Seccomp"].strip(),
    "first": os.getpid(), "host": os.uname().nodename,
    "user_namespace_refused": refused("unshare", "--user", "true"),
    "mount_refused": refused("mount", "-t", "tmpfs", "x", "/mnt"),
    "others": sorted(p for p in os.listdir("/proc") if p.isdigit()),
}))"""
    seen = json.loads(run(kubectl, node, namespace, program, spec={"securityContext": {"fsGroup": 4242}}))
    assert set(seen["uid"]) == set(seen["gid"]) == {"65532"}
    assert seen["groups"] == ["4242"]
    assert set(seen["caps"]) == {"0" * 16}
    assert (seen["no_new_privs"], seen["seccomp"]) == ("1", "2")
    assert seen["user_namespace_refused"]
    assert seen["mount_refused"]
    assert (seen["first"], seen["host"], seen["others"]) == (1, "probe", ["1"])


def test_unset_rights_are_a_container_runtimes_defaults(node, kubectl, namespace):
    program = """
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(status["Uid"].split()[0], status["CapEff"].strip(), status["NoNewPrivs"].strip(), status["Seccomp"].strip())"""
    seen = run(kubectl, node, namespace, program, securityContext={}).split()
    assert seen == ["0", "00000000a80425fb", "0", "0"]


def test_service_account_token_is_accepted_by_the_api_server(node, kubectl, namespace):
    program = """
import os, ssl, urllib.error, urllib.request
home = "/var/run/secrets/kubernetes.io/serviceaccount"
own = open(f"{home}/namespace").read()
url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/namespaces/{own}/pods"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(f"{home}/token").read()})
try: urllib.request.urlopen(request, context=ssl.create_default_context(cafile=f"{home}/ca.crt"))
except urllib.error.HTTPError as error: print(error.code, error.read().decode())"""
    seen = run(kubectl, node, namespace, program)
    assert seen.startswith("403 ")
    assert f"system:serviceaccount:{namespace}:default" in seen


def test_changed_config_map_reaches_the_running_container(node, kubectl, namespace):
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "old"}}
    apply(kubectl, namespace, settings)
    program = """
import time
while True:
    print(open("/settings/a").read(), flush=True); time.sleep(0.2)"""
    mounts = [{"name": "cm", "mountPath": "/settings"}]
    main = container(["python", "-c", program], volumeMounts=mounts)
    apply(kubectl, namespace, pod("reader", main, volumes=[{"name": "cm", "configMap": {"name": "settings"}}]))
    wait_log(node, namespace, "reader", "old")
    apply(kubectl, namespace, settings | {"data": {"a": "new"}})
    wait_log(node, namespace, "reader", "new")


@pytest.mark.parametrize(
    ("spec", "fields", "named"),
    [
        ({"hostNetwork": True}, {}, "spec.hostNetwork"),
        ({"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, {}, "spec.volumes[0].hostPath"),
        ({}, {"securityContext": {"privileged": True}}, "spec.containers[0].securityContext.privileged"),
        ({}, {"securityContext": {"runAsNonRoot": True}}, "spec.containers[0].securityContext.runAsNonRoot"),
        (
            {},
            {"securityContext": RESTRICTED | {"capabilities": {"add": ["NET_ADMIN"]}}},
            "spec.containers[0].securityContext.capabilities.add",
        ),
        (
            {"volumes": [{"name": "v", "emptyDir": {}}]},
            {"volumeMounts": [{"name": "v", "mountPath": "/usr/absent"}]},
            "spec.containers[0].volumeMounts[0].mountPath",
        ),
        ({}, {"tty": True}, "spec.containers[0].tty"),
    ],
)
def test_what_cannot_be_honoured_refuses_the_pod_by_name(node, kubectl, namespace, spec, fields, named):
    apply(kubectl, namespace, pod("odd", container(["true"], **fields), **spec))

    def waiting() -> dict:
        statuses = get(kubectl, namespace, "pod", "odd")["status"].get("containerStatuses") or [{}]
        found = statuses[0].get("state", {}).get("waiting", {})
        return found if found.get("reason") == "CreateContainerConfigError" else {}

    assert wait_until("the Pod is refused", waiting)["message"].startswith(f"{named}:")
    kubectl("--namespace", namespace, "delete", "pod", "odd", "--timeout=60s")
