"""From what is observed to status and conditions, with kstatus semantics.

One `Verdict` a kind decides Ready. Reconciling is there while the operator or the cluster still works towards the
spec, Stalled while only a person can help (an invalid spec, a name that is taken, a rollout past its deadline); neither
while all is well. A service scaled to 0 replicas is Ready=False, reason ScaledToZero, and neither Reconciling nor
Stalled: the column says whether it serves, and it does not. Messages hold nothing that changes by itself, so that an
unchanged service has an unchanged status. `SLOMet` is absent: nothing measures it yet. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from paceline_api.conditions import Fact, Type, find, merge
from paceline_api.kube import Manifest
from paceline_operator.planner.manifests import dig
from paceline_operator.planner.model import EventNote, PodFact

MESSAGE_LENGTH_MAX = 1024
UNSCHEDULABLE = "Unschedulable"


class Outlook(Enum):
    """Whether waiting helps."""

    SETTLED = "settled"
    RECONCILING = "reconciling"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an object is Ready or not."""

    ready: bool
    reason: str
    message: str
    outlook: Outlook = Outlook.SETTLED
    warning: bool = False

    def facts(self) -> list[Fact]:
        message = self.message[:MESSAGE_LENGTH_MAX]
        return [
            Fact(Type.READY, self.ready, self.reason, message),
            Fact(Type.RECONCILING, self.outlook is Outlook.RECONCILING, self.reason, message),
            Fact(Type.STALLED, self.outlook is Outlook.STALLED, self.reason, message),
        ]


def reconciling(reason: str, message: str, *, warning: bool = False) -> Verdict:
    return Verdict(False, reason, message, Outlook.RECONCILING, warning)


def stalled(reason: str, message: str) -> Verdict:
    return Verdict(False, reason, message, Outlook.STALLED, warning=True)


@dataclass(frozen=True, slots=True)
class StatusChange:
    """The status to write (None: it is written already), whether it may not wait, and Events on what flipped."""

    manifest: Manifest | None
    urgent: bool
    events: tuple[EventNote, ...]


def status_change(
    manifest: Manifest, verdict: Verdict, facts: Sequence[Fact], fields: Manifest, now: float
) -> StatusChange:
    """Compares with the status in `manifest`. `now` is Unix seconds; `fields` go beside the conditions."""
    before: Manifest = manifest.get("status") or {}
    generation = int(dig(manifest, "metadata", "generation") or 0)
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    old: list[Manifest] = before.get("conditions") or []
    conditions = merge(old, [*verdict.facts(), *facts], generation=generation, now=stamp)
    status: Manifest = {"observedGeneration": generation, **fields, "conditions": conditions}
    events = _events(old, verdict)
    if status == before:
        return StatusChange(None, False, events)
    metadata = manifest["metadata"]
    document: Manifest = {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "status": status,
    }
    return StatusChange(document, _signature(before) != _signature(status), events)


def _signature(status: Manifest) -> list[Any]:
    conditions: list[Manifest] = status.get("conditions") or []
    return [
        status.get("observedGeneration"),
        *((item.get("type"), item.get("status"), item.get("reason")) for item in conditions),
    ]


def _events(old: list[Manifest], verdict: Verdict) -> tuple[EventNote, ...]:
    ready = find(old, Type.READY) or {}
    if ready.get("reason") == verdict.reason and ready.get("status") == str(verdict.ready):
        return ()
    if verdict.ready or verdict.warning:
        return (EventNote(verdict.reason, verdict.message[:MESSAGE_LENGTH_MAX], verdict.warning),)
    return ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """A Deployment's progress towards what is wanted. `template_hash` None accepts whatever template it has."""

    wanted: int
    template_hash: str | None
    deployment: Manifest | None
    pods: tuple[PodFact, ...]

    def count(self, name: str) -> int:
        return int(dig(self.deployment, "status", name) or 0)

    @property
    def current_pods(self) -> list[PodFact]:
        return [pod for pod in self.pods if self.template_hash in (None, pod.config_hash)]

    @property
    def failing_pod(self) -> PodFact | None:
        """A pod of the current template that does not run; the first by name, so that the message is steady."""
        failing = [pod for pod in self.current_pods if pod.problem is not None and not pod.ready]
        return min(failing, key=lambda pod: pod.name, default=None)

    @property
    def problem(self) -> str | None:
        """Why that pod does not run."""
        pod = self.failing_pod
        if pod is None or pod.problem is None:
            return None
        return f"pod {pod.name}: {pod.problem[0]}: {pod.problem[1]}".rstrip(": ")

    @property
    def unschedulable(self) -> bool:
        pod = self.failing_pod
        return pod is not None and pod.problem is not None and pod.problem[0] == UNSCHEDULABLE

    @property
    def observed(self) -> bool:
        """Whether the Deployment in the API, and its controller's view of it, are those that are wanted."""
        metadata: Manifest = dig(self.deployment, "metadata") or {}
        template = dig(self.deployment, "spec", "template", "metadata", "annotations", "paceline.dev/config-hash")
        return (
            self.deployment is not None
            and self.count("observedGeneration") >= int(metadata.get("generation") or 0)
            and dig(self.deployment, "spec", "replicas") == self.wanted
            and self.template_hash in (None, template)
        )

    @property
    def done(self) -> bool:
        return (
            self.observed
            and self.count("updatedReplicas") == self.wanted
            and self.count("replicas") == self.wanted
            and self.count("readyReplicas") >= self.wanted
        )

    @property
    def deadline_passed(self) -> bool:
        progressing = find(dig(self.deployment, "status", "conditions") or [], "Progressing") or {}
        return self.observed and progressing.get("reason") == "ProgressDeadlineExceeded"


def rollout_verdict(rollout: Rollout, noun: str) -> Verdict | None:
    """None when every wanted replica of the current template is ready. `noun` is Engines or Router."""
    if rollout.done:
        return None
    problem = rollout.problem
    if rollout.deadline_passed:
        return stalled("ProgressDeadlineExceeded", problem or "replicas did not get ready in time; see their pods")
    if problem is not None:
        reason = f"{noun}Unschedulable" if rollout.unschedulable else f"{noun}Failing"
        return reconciling(reason, problem, warning=True)
    current = sum(pod.ready for pod in rollout.current_pods)
    message = f"{current} of {rollout.wanted} replicas of this generation are ready"
    reason = "RollingOut" if rollout.count("readyReplicas") else f"{noun}Starting"
    return reconciling(reason, message)
