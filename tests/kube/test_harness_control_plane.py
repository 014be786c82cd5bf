"""The harness's control plane is a real one: it starts, authorizes, collects garbage and logs every write."""

from __future__ import annotations

import pytest
from audit_log import AuditLog
from control_plane import ControlPlane, is_ready, wait_until
from kube_manifests import apply, get

pytestmark = pytest.mark.kube

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "facts"}, "data": {"a": "1"}}


@pytest.mark.parametrize("written", ["", "-----BEGIN CERTIFICATE-----"])
def test_a_half_written_certificate_means_not_ready_yet(tmp_path, written):
    certificate = tmp_path / "apiserver.crt"
    certificate.write_text(written)
    plane = ControlPlane(tmp_path, "https://127.0.0.1:1", tmp_path, "", ca_file=certificate, tokens={"admin": "x"})
    assert not is_ready(plane)


def test_kubectl_and_dynamic_client_reach_the_same_server(kubectl, api, namespace):
    apply(kubectl, namespace, CONFIG_MAP)
    maps = api.resources.get(api_version="v1", kind="ConfigMap")
    assert maps.get(name="facts", namespace=namespace).data.to_dict() == {"a": "1"}


def test_kubectl_error_carries_the_servers_words(kubectl, namespace):
    with pytest.raises(AssertionError, match="NotFound"):
        kubectl("--namespace", namespace, "get", "configmap", "absent")


def test_audit_log_counts_mutations_only(audit: AuditLog, kubectl, namespace):
    mark = audit.mark()
    apply(kubectl, namespace, CONFIG_MAP)
    written = [(w.verb, w.resource, w.name, w.user) for w in audit.writes(mark, namespace)]
    assert written == [("create", "configmaps", "facts", "admin")]
    mark = audit.mark()
    apply(kubectl, namespace, CONFIG_MAP)
    get(kubectl, namespace, "configmap", "facts")
    kubectl("--namespace", namespace, "annotate", "configmap/facts", "x=y", "--dry-run=server")
    with pytest.raises(AssertionError, match="nosuchfield"):
        kubectl("--namespace", namespace, "create", "-f", "-", stdin='{"kind":"Pod","apiVersion":"v1","nosuchfield":1}')
    assert audit.writes(mark, namespace) == []


def test_owned_objects_are_garbage_collected(kubectl, namespace):
    apply(kubectl, namespace, CONFIG_MAP)
    owner = get(kubectl, namespace, "configmap", "facts")["metadata"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "facts", "uid": owner["uid"]}
    child = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "child", "ownerReferences": [reference]},
    }
    apply(kubectl, namespace, child)
    kubectl("--namespace", namespace, "delete", "configmap", "facts")
    wait_until(
        "the owned Secret is gone",
        lambda: "child" not in kubectl("--namespace", namespace, "get", "secrets", "-o", "name"),
        timeout=60,
    )


def test_service_account_has_no_rights_of_its_own(control_plane: ControlPlane, kubectl, namespace):
    token = kubectl("--namespace", namespace, "create", "token", "default").strip()
    with pytest.raises(AssertionError, match=f"system:serviceaccount:{namespace}:default"):
        kubectl(
            "--namespace", namespace, "get", "secrets", f"--kubeconfig={control_plane.write_kubeconfig('x', token)}"
        )
