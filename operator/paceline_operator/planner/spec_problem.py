"""What is wrong with a valid spec that no schema can say: arguments, the runtime's limits, the pod template. Pure."""

from __future__ import annotations

from paceline_api.v1alpha1 import InferenceService
from paceline_operator.planner.engine_args import extra_args_problem
from paceline_operator.planner.pod_template import pod_template_problem
from paceline_operator.planner.runtimes.registry import foreign_of, runtime_problem


def spec_problem(service: InferenceService) -> tuple[str, str] | None:
    """(reason of the condition, "spec.field: why") of the first problem; None if there is none."""
    if foreign_of(service) is None and (problem := extra_args_problem(service)) is not None:
        return "InvalidSpec", problem
    if (problem := runtime_problem(service)) is not None:
        return "RuntimeUnsupported", problem
    if (problem := pod_template_problem(service)) is not None:
        return "PodTemplateRefused", problem
    return None
