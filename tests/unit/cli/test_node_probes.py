"""Probe verdicts need the full number of results in a row; pod status is what a kubelet would report."""

import pytest

from paceline_cli.node.probes import ProbeKind, ProbeState, Verdict
from paceline_cli.node.status import ContainerView, PodView, Running, Terminated, Waiting, pod_status

NOW = "2026-01-01T00:00:00Z"
LATER = "2026-01-01T00:00:09Z"


def test_readiness_flips_only_after_a_full_streak() -> None:
    state = ProbeState(ProbeKind.READINESS, failure_threshold=3, success_threshold=2)
    results = [True, False, True, True, False, False, True, False, False, False]
    flips = [state.record(ok) for ok in results]
    changed = [(index, verdict) for index, verdict in enumerate(flips) if verdict is not Verdict.UNCHANGED]
    assert changed == [(3, Verdict.PASSED), (9, Verdict.FAILED)]


def test_liveness_passes_until_it_has_failed_in_a_row() -> None:
    state = ProbeState(ProbeKind.LIVENESS, failure_threshold=2, success_threshold=1)
    assert state.passed
    assert [state.record(ok) for ok in (False, True, False)] == [Verdict.UNCHANGED] * 3
    assert state.record(False) is Verdict.FAILED


def test_a_startup_probe_that_never_passed_fails() -> None:
    state = ProbeState(ProbeKind.STARTUP, failure_threshold=2, success_threshold=1)
    assert state.record(False) is Verdict.UNCHANGED
    assert state.record(False) is Verdict.FAILED


def container(state: object, **more: object) -> ContainerView:
    return ContainerView("c", "i", state, **more)


DEAD = Terminated(1, "Error", NOW, NOW)
DONE = Terminated(0, "Completed", NOW, NOW)


@pytest.mark.parametrize(
    ("view", "phase"),
    [
        (PodView([container(Waiting("ContainerCreating"))]), "Pending"),
        (PodView([container(Running(NOW))]), "Running"),
        (PodView([container(Waiting("CrashLoopBackOff"), last_state=DEAD)]), "Running"),
        (PodView([container(DONE)], restart_policy="Never"), "Succeeded"),
        (PodView([container(DONE), container(DEAD)], restart_policy="Never"), "Failed"),
        (PodView([container(Waiting("PodInitializing"))], init_containers=[container(Running(NOW))]), "Pending"),
        (
            PodView([container(Waiting("x"))], init_containers=[container(DEAD)], restart_policy="Never"),
            "Failed",
        ),
        (PodView([container(Running(NOW))], failure=("Evicted", "too big")), "Failed"),
    ],
)
def test_phase(view: PodView, phase: str) -> None:
    assert pod_status(view, NOW)["phase"] == phase


def test_ready_needs_every_container_and_keeps_its_transition_time() -> None:
    ready = container(Running(NOW), ready=True, started=True)
    first = pod_status(PodView([ready, container(Running(NOW))], pod_ip="10.0.0.1"), NOW)
    conditions = {c["type"]: c for c in first["conditions"]}
    assert conditions["Ready"]["status"] == "False"
    assert conditions["Ready"]["reason"] == "ContainersNotReady"
    assert conditions["Ready"]["message"] == "containers with unready status: [c]"
    second = pod_status(PodView([ready, ready], pod_ip="10.0.0.1"), LATER, first)
    conditions = {c["type"]: c for c in second["conditions"]}
    assert (conditions["Ready"]["status"], conditions["Ready"]["lastTransitionTime"]) == ("True", LATER)
    assert conditions["Initialized"]["lastTransitionTime"] == NOW
    assert second["podIPs"] == [{"ip": "10.0.0.1"}]
