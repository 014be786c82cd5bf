"""Plain Deployments on the harness's node: rollout, endpoints, probes, restarts, deletion - no Paceline objects."""

from __future__ import annotations

import time

import node_agent
import pytest
from control_plane import wait_until
from kube_manifests import (
    SERVER,
    apply,
    container,
    deployment,
    get,
    http_status,
    network_namespace_of,
    network_namespaces,
    pod,
    processes_naming,
    service,
    wait_log,
    wait_ready,
)
from network_namespace import bridge_ports

pytestmark = pytest.mark.kube

PORTS = [{"name": "http", "containerPort": 8080}]
READINESS = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}


def web(name: str, **spec):
    return deployment(name, container(SERVER, ports=PORTS, readinessProbe=READINESS), **spec)


def ready_addresses(kubectl, namespace: str, name: str) -> set[str]:
    found = get(kubectl, namespace, "endpointslices", "-l", f"kubernetes.io/service-name={name}")
    ends = [e for item in found["items"] for e in item.get("endpoints") or [] if e["conditions"]["ready"]]
    return {address for end in ends for address in end["addresses"]}


def answers(url: str) -> bool:
    try:
        return http_status(url) == 200
    except OSError:
        return False


def test_deployment_becomes_ready_and_answers_on_its_endpoints(node, kubectl, namespace):
    apply(kubectl, namespace, web("web", replicas=2), service("web", "http"))
    wait_ready(kubectl, namespace, "deployment/web")
    wait_until("two endpoints are ready", lambda: len(ready_addresses(kubectl, namespace, "web")) == 2)
    pods = get(kubectl, namespace, "pods")["items"]
    assert {p["status"]["podIP"] for p in pods} == ready_addresses(kubectl, namespace, "web")
    assert {p["spec"]["nodeName"] for p in pods} == {node.name}
    for address in ready_addresses(kubectl, namespace, "web"):
        assert http_status(f"http://{address}:8080/") == 200


def test_deletion_leaves_no_process_no_namespace_and_no_link(node, kubectl, namespace):
    apply(kubectl, namespace, web("web"))
    wait_ready(kubectl, namespace, "deployment/web")
    uid = get(kubectl, namespace, "pods")["items"][0]["metadata"]["uid"]
    link = f"v{uid.replace('-', '')[:12]}"
    inside = {network_namespace_of(pid) for pid in processes_naming(uid)}
    assert len(inside) == 1
    assert inside <= network_namespaces()
    assert link in bridge_ports()
    kubectl("--namespace", namespace, "delete", "deployment", "web", "--cascade=foreground", "--timeout=60s")
    assert processes_naming(uid) == []
    assert not inside & network_namespaces()
    assert link not in bridge_ports()
    assert not (node.folder / "sandboxes" / uid).exists()


def test_killing_the_node_ends_its_containers_and_a_new_agent_runs_them_again(node, kubectl, namespace):
    apply(kubectl, namespace, web("web"), service("web", "http"))
    wait_ready(kubectl, namespace, "deployment/web")
    first = get(kubectl, namespace, "pods")["items"][0]
    uid = first["metadata"]["uid"]
    assert processes_naming(uid)
    node.stop()
    wait_until("the containers ended with their node", lambda: not processes_naming(uid))
    node_agent.start(node.plane)
    # A new sandbox has a new address, so an old one in the EndpointSlice would show.
    wait_until(
        "the same Pod is ready at a new address",
        lambda: ready_addresses(kubectl, namespace, "web") - {first["status"]["podIP"]},
        timeout=60,
    )
    pods = get(kubectl, namespace, "pods")["items"]
    assert [p["metadata"]["uid"] for p in pods] == [uid]
    address = pods[0]["status"]["podIP"]
    wait_until("the server answers", lambda: answers(f"http://{address}:8080/"))


def test_rollout_replaces_pods_and_never_drops_below_one(node, kubectl, namespace):
    apply(kubectl, namespace, web("web"))
    wait_ready(kubectl, namespace, "deployment/web")
    first = get(kubectl, namespace, "pods")["items"][0]["metadata"]["name"]
    kubectl("--namespace", namespace, "set", "env", "deployment/web", "VERSION=2")
    kubectl("--namespace", namespace, "rollout", "status", "deployment/web", "--timeout=60s")
    wait_until(
        "the old Pod is gone", lambda: first not in kubectl("--namespace", namespace, "get", "pods", "-o", "name")
    )
    assert len(get(kubectl, namespace, "pods")["items"]) == 1


def test_failing_readiness_takes_the_pod_out_of_its_service(node, kubectl, namespace):
    main = container(
        SERVER,
        ports=PORTS,
        readinessProbe={"exec": {"command": ["test", "!", "-e", "/tmp/sick"]}, "periodSeconds": 1, "timeoutSeconds": 5},
    )
    main["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    apply(
        kubectl, namespace, deployment("web", main, volumes=[{"name": "tmp", "emptyDir": {}}]), service("web", "http")
    )
    wait_ready(kubectl, namespace, "deployment/web")
    wait_until("the endpoint is ready", lambda: ready_addresses(kubectl, namespace, "web"))
    uid = get(kubectl, namespace, "pods")["items"][0]["metadata"]["uid"]
    (node.folder / "state" / "pods" / uid / "tmp" / "sick").touch()
    wait_until("the endpoint is gone", lambda: not ready_addresses(kubectl, namespace, "web"))


def test_liveness_failure_restarts_the_container(node, kubectl, namespace):
    program = "import sys, time; print('run', flush=True); time.sleep(600)"
    probe = {"exec": {"command": ["false"]}, "initialDelaySeconds": 2, "periodSeconds": 1, "failureThreshold": 1}
    main = container(["python", "-c", program], livenessProbe=probe)
    apply(kubectl, namespace, pod("sick", main))

    def status():
        return (get(kubectl, namespace, "pod", "sick")["status"].get("containerStatuses") or [{}])[0]

    restarted = wait_until("the container was restarted", lambda: status().get("restartCount") and status())
    # Its first process has no handler for SIGTERM, so only SIGKILL ended it.
    assert restarted["lastState"]["terminated"]["exitCode"] == 137
    # On a busy machine a run may be ended before it has written anything; one of the next ones is not.
    wait_until("two runs are in the log", lambda: node.log(namespace, "sick", "main").count("run") >= 2, timeout=60)


def test_crash_is_reported_with_its_exit_code(node, kubectl, namespace):
    apply(kubectl, namespace, pod("crash", container(["python", "-c", "raise SystemExit(7)"]), restartPolicy="Never"))
    kubectl("--namespace", namespace, "wait", "--for=jsonpath={.status.phase}=Failed", "pod/crash", "--timeout=60s")
    state = get(kubectl, namespace, "pod", "crash")["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["exitCode"] == 7


def test_pre_stop_runs_inside_the_container_and_before_sigterm(node, kubectl, namespace):
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
        volumeMounts=[{"name": "hook", "mountPath": "/run/hook"}],
    )
    volumes = [{"name": "hook", "emptyDir": {}}]
    apply(kubectl, namespace, pod("stop", main, volumes=volumes, terminationGracePeriodSeconds=600))
    wait_log(node, namespace, "stop", "started")
    # Its end at SIGTERM, not at the end of its grace period, is what this waits for.
    kubectl("--namespace", namespace, "delete", "pod", "stop", "--timeout=60s")
    assert "term after ['saw-main-process']" in node.log(namespace, "stop", "main")


def test_a_process_that_ignores_sigterm_is_killed_at_the_end_of_its_grace(node, kubectl, namespace):
    main = container(["python", "-c", "import time; print('started', flush=True); time.sleep(600)"])
    apply(kubectl, namespace, pod("stubborn", main, terminationGracePeriodSeconds=2))
    wait_log(node, namespace, "stubborn", "started")
    began = time.monotonic()
    kubectl("--namespace", namespace, "delete", "pod", "stubborn", "--timeout=60s")
    assert time.monotonic() - began >= 2


def test_exit_on_sigterm_reaches_the_first_process_once(node, kubectl, namespace):
    program = (
        "import signal, time\nseen = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: seen.append(1)); print('started', flush=True)\n"
        "while not seen: time.sleep(0.05)\n"
        "time.sleep(1); print('signals', len(seen), flush=True)\n"
    )
    apply(kubectl, namespace, pod("count", container(["python", "-c", program]), terminationGracePeriodSeconds=20))
    wait_log(node, namespace, "count", "started")
    kubectl("--namespace", namespace, "delete", "pod", "count", "--timeout=60s")
    assert "signals 1" in node.log(namespace, "count", "main")


def test_quiet_node_writes_nothing(audit, node, kubectl, namespace):
    apply(kubectl, namespace, web("web"))
    wait_ready(kubectl, namespace, "deployment/web")

    def settled() -> bool:
        mark = audit.mark()
        time.sleep(2)
        return audit.writes(mark, namespace) == []

    wait_until("two seconds pass without a write", settled)
