"""The index: what it keeps of an object, which version wins, and how a resync finds ghosts."""

from operator_samples import NAMESPACE, service

from paceline_api.kube import DEPLOYMENT, INFERENCE_SERVICE, POD, SERVICE
from paceline_operator.cache import Cache, trimmed

LABEL = "paceline.dev/inference-service"


def deployment(name="a", uid="u1", version="1", owner="chat"):
    meta = {"name": name, "namespace": NAMESPACE, "uid": uid, "resourceVersion": version, "labels": {LABEL: owner}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": {}}


def names(cache, owner="chat"):
    return [item["metadata"]["name"] for item in cache.labelled(DEPLOYMENT, NAMESPACE, LABEL, owner)]


def test_an_older_version_never_replaces_a_newer_one():
    cache = Cache()
    assert cache.put(DEPLOYMENT, deployment(version="10"))
    assert not cache.put(DEPLOYMENT, deployment(version="9"))
    assert cache.put(DEPLOYMENT, deployment(version="11"))


def test_an_object_made_anew_under_the_same_name_replaces_the_old_one():
    cache = Cache()
    cache.put(DEPLOYMENT, deployment(uid="old", version="50"))
    assert cache.put(DEPLOYMENT, deployment(uid="new", version="7"))
    cache.remove(DEPLOYMENT, deployment(uid="old"))
    assert names(cache) == ["a"], "a late deletion of the old object took the new one away"


def test_an_answer_that_arrives_after_the_deletion_does_not_bring_the_object_back():
    cache = Cache()
    cache.put(DEPLOYMENT, deployment(version="1"))
    cache.remove(DEPLOYMENT, deployment(version="3"))
    assert not cache.put(DEPLOYMENT, deployment(version="2"))
    assert cache.get(DEPLOYMENT, NAMESPACE, "a") is None


def test_an_object_that_left_the_selector_comes_back_with_its_next_version():
    """A watch with a selector reports an object that loses its label as deleted, at the version of that change."""
    cache = Cache()
    cache.put(DEPLOYMENT, deployment(version="1"))
    cache.remove(DEPLOYMENT, deployment(version="3"))
    assert cache.put(DEPLOYMENT, deployment(version="4"))
    assert names(cache) == ["a"]
    assert cache.put(DEPLOYMENT, deployment(version="5"))


def test_a_changed_label_moves_the_object_in_the_index():
    cache = Cache()
    cache.put(DEPLOYMENT, deployment(version="1"))
    cache.put(DEPLOYMENT, deployment(version="2", owner="other"))
    assert names(cache) == []
    assert names(cache, "other") == ["a"]
    assert cache.label_values(DEPLOYMENT, None, LABEL) == {(NAMESPACE, "other")}


def test_a_resync_drops_ghosts_and_takes_what_was_missed():
    cache = Cache()
    for name in ("kept", "ghost", "young"):
        cache.put(DEPLOYMENT, deployment(name, uid=name))
    alive = {"young": deployment("young", uid="young")}
    listed = [deployment("kept", uid="kept"), deployment("missed", uid="missed")]
    changed, ghosts = cache.correct(DEPLOYMENT, NAMESPACE, listed, lambda _, name: alive.get(name))
    assert [item["metadata"]["name"] for item in ghosts] == ["ghost"]
    assert [item["metadata"]["name"] for item in changed] == ["missed"]
    assert names(cache) == ["kept", "missed", "young"]


def test_a_resync_of_one_namespace_leaves_the_others_alone():
    cache = Cache()
    elsewhere = deployment("far")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    cache.put(DEPLOYMENT, elsewhere)
    _, ghosts = cache.correct(DEPLOYMENT, NAMESPACE, [], lambda *_: None)
    assert not ghosts
    assert cache.get(DEPLOYMENT, "elsewhere", "far") is not None


def test_a_ghost_whose_name_lives_on_is_replaced():
    cache = Cache()
    cache.put(DEPLOYMENT, deployment(uid="old", version="5"))
    _, ghosts = cache.correct(DEPLOYMENT, NAMESPACE, [], lambda *_: deployment(uid="new", version="9"))
    assert [item["metadata"]["uid"] for item in ghosts] == ["old"]
    assert cache.get(DEPLOYMENT, NAMESPACE, "a")["metadata"]["uid"] == "new"


def test_objects_are_trimmed_and_the_callers_are_left_as_they_were():
    manifest = service()
    manifest["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    manifest["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "1"}
    small = trimmed(INFERENCE_SERVICE, manifest)
    assert small["metadata"]["annotations"] == {"mine": "1"}
    assert "managedFields" not in small["metadata"]
    assert "managedFields" in manifest["metadata"]


def test_a_pod_keeps_only_its_revision_and_why_it_does_not_run():
    pod = {
        "metadata": {
            "name": "p",
            "namespace": NAMESPACE,
            "labels": {LABEL: "chat", "app": "x"},
            "annotations": {"paceline.dev/config-hash": "h", "big": "x" * 1000},
        },
        "spec": {"containers": [{"env": ["x"] * 100}]},
        "status": {"podIP": "1.2.3.4", "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": None}]},
    }
    small = trimmed(POD, pod)
    assert "spec" not in small
    assert small["metadata"]["annotations"] == {"paceline.dev/config-hash": "h"}
    assert small["metadata"]["labels"] == {LABEL: "chat"}
    assert len(str(small)) < 500


def test_a_service_keeps_its_address():
    ingress = {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}]}}
    manifest = {"metadata": {"name": "s", "namespace": NAMESPACE}, "spec": {}, "status": ingress}
    assert trimmed(SERVICE, manifest)["status"] == ingress
