"""Other engine software on the real API server: every kind's children, and one server of somebody's own, in Pods."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, wait_until
from operator_process import OPERATOR_USER, Cluster, InProcess, condition, install, service

from paceline_api.kube import DEPLOYMENT, ENDPOINT_SLICE, INFERENCE_SERVICE
from paceline_kube import OfficialKubeClient

pytestmark = pytest.mark.kube
READY_S = 110.0
KEY = "sk-test-key"


@pytest.fixture
def cluster(node: Any, control_plane: ControlPlane, kubectl: Callable[..., str], namespace: str) -> Cluster:
    install(control_plane, kubectl)
    return Cluster(kubectl, OfficialKubeClient.connect(control_plane.kubeconfig), namespace)


@pytest.fixture
def operator(cluster: Cluster, control_plane: ControlPlane) -> Iterator[InProcess]:
    token = cluster.kubectl_anywhere("--namespace", "paceline-system", "create", "token", "paceline-operator").strip()
    kubeconfig: Path = control_plane.write_kubeconfig(f"operator-{cluster.namespace}", token)
    running = InProcess(kubeconfig, cluster.namespace).start()
    yield running
    running.stop()


GPU = {"limits": {"nvidia.com/gpu": 1}}
HUB, GGUF_ON_HUB = {"source": "hf://org/name"}, {"source": "hf://org/name/file.gguf"}
RUNTIMES: dict[str, dict[str, Any]] = {
    "vllm": {"model": HUB, "engine": {"resources": GPU, "speculative": {"method": "ngram"}}},
    "sglang": {"model": {"source": "pvc://weights/chat"}, "engine": {"resources": GPU}},
    "llamacpp": {"model": {**GGUF_ON_HUB, "chatTemplate": "{{ messages }}"}, "engine": {"maxModelLen": 1024}},
    "ollama": {"model": GGUF_ON_HUB, "engine": {"kvCacheDtype": "int8"}},
    "trtllm": {"model": HUB, "engine": {"resources": GPU}},
    "tritonserver": {"model": {"source": "s3://bucket/models"}, "engine": {"extraArgs": ["--tokenizer=org/name"]}},
    "nim": {"model": {"source": "image://llama"}, "engine": {"image": "nim:1", "resources": GPU}},
    "custom": {
        "model": {"source": "image://own"},
        "engine": {
            "image": "own:1",
            "podTemplate": {
                "metadata": {"labels": {"team": "a"}},
                "spec": {
                    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"}}
                    ]}},
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                    "imagePullSecrets": [{"name": "registry"}],
                    "volumes": [{"name": "files", "configMap": {"name": "files"}}],
                    "containers": [{
                        "name": "engine",
                        "command": ["/server"],
                        "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                        "volumeMounts": [{"name": "files", "mountPath": "/files"}],
                        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}},
                    }],
                },
            },
        },
    },
}  # fmt: skip


def test_every_other_engine_is_accepted_restricted_and_then_left_alone(
    operator: InProcess, control_plane: ControlPlane, cluster: Cluster
):
    # Without replicas: images and devices are not here.
    objects = [
        service(name, replicas=0, model=spec["model"], engine={"runtime": name, **spec["engine"]})
        for name, spec in RUNTIMES.items()
    ]
    cluster.apply(*objects)
    cluster.wait_children(*(f"Deployment/{name}-engine" for name in RUNTIMES))
    for name in RUNTIMES:
        cluster.wait_reason(INFERENCE_SERVICE, name, "ScaledToZero")
    operator.settle()
    mark = control_plane.audit.mark()
    cluster.apply(*objects)
    operator.operator.resync()
    operator.settle()
    own = [write for write in control_plane.audit.writes(mark, cluster.namespace) if write.user == OPERATOR_USER]
    assert [str(write) for write in own] == [], "a settled namespace was written to"

    cluster.kubectl_anywhere("label", "namespace", cluster.namespace, "pod-security.kubernetes.io/enforce=restricted")
    for name in RUNTIMES:
        template = cluster.get(DEPLOYMENT, f"{name}-engine")["spec"]["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": "trial"}}
        cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def test_what_a_runtime_lacks_is_stalled_and_its_engines_stay(operator: InProcess, cluster: Cluster):
    fields = {"replicas": 0, "model": {"source": "file:///m.gguf"}}
    cluster.apply(service(engine={"runtime": "llamacpp"}, **fields))
    cluster.wait_children("Deployment/chat-engine")
    cluster.apply(service(engine={"runtime": "llamacpp", "blockSize": 16}, **fields))
    cluster.wait_reason(INFERENCE_SERVICE, "chat", "RuntimeUnsupported")
    stalled = condition(cluster.get(INFERENCE_SERVICE, "chat"), "Stalled")
    assert stalled["message"].startswith(
        "spec.engine.blockSize: runtime llamacpp has no blockSize; use runtime paceline"
    )
    assert "Deployment/chat-engine" in cluster.children()


SERVER = """
import http.server, json, os

class Handler(http.server.BaseHTTPRequestHandler):
    def _answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer({})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        private = [name for name in self.headers if name.lower().startswith(("x-paceline", "authorization"))]
        said = f"{os.environ['PACELINE_SERVED_NAME']} as {os.getuid()}, told {private}"
        choices = [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]
        self._answer({"object": "chat.completion", "choices": choices, "usage": {"completion_tokens": 1}})

http.server.ThreadingHTTPServer(("", int(os.environ["PACELINE_PORT_HTTP"])), Handler).serve_forever()
"""


def router_address(cluster: Cluster) -> str:
    """host:port of the ready router."""
    selector = "kubernetes.io/service-name=paceline-default-router"
    for item in cluster.client.list(ENDPOINT_SLICE, cluster.namespace, label_selector=selector).items:
        port = next((port["port"] for port in item.get("ports") or [] if port["name"] == "http"), None)
        for endpoint in item.get("endpoints") or []:
            if port is not None and endpoint["conditions"].get("ready"):
                return f"{endpoint['addresses'][0]}:{port}"
    return ""


def chat(where: str) -> dict[str, Any] | None:
    body = json.dumps({"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://{where}/v1/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        return None


@pytest.mark.timeout(240)
def test_a_server_of_ones_own_answers_behind_the_router(operator: InProcess, cluster: Cluster):
    cluster.kubectl("create", "secret", "generic", "team-key", f"--from-literal=apiKey={KEY}")
    cluster.kubectl("create", "configmap", "server", f"--from-literal=server.py={SERVER}")
    team = {"apiVersion": "paceline.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "team"}}
    template = {
        "spec": {
            "securityContext": {"runAsUser": 12345},
            "volumes": [{"name": "server", "configMap": {"name": "server"}}],
            "containers": [
                {
                    "name": "engine",
                    "command": ["python", "/server/server.py"],
                    "volumeMounts": [{"name": "server", "mountPath": "/server"}],
                }
            ],
        }
    }
    engine = {"runtime": "custom", "image": "own:1", "podTemplate": template}
    model = {"source": "image://own", "servedName": "smollm2"}
    cluster.apply(service(engine=engine, model=model), {**team, "spec": {"apiKeySecretRefs": [{"name": "team-key"}]}})
    cluster.wait_reason(INFERENCE_SERVICE, "chat", "Serving", timeout=READY_S)
    where = wait_until("the router has an address", lambda: router_address(cluster), timeout=READY_S)
    document = wait_until("the router knows the key and the engine", lambda: chat(where), timeout=READY_S)
    assert document["choices"][0]["message"]["content"] == "smollm2 as 12345, told []"
    selector = "kubernetes.io/service-name=chat-engine,paceline.dev/runtime=custom"
    assert cluster.client.list(ENDPOINT_SLICE, cluster.namespace, label_selector=selector).items
