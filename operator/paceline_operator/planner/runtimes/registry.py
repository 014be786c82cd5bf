"""Every engine software by name, and what is wrong with a spec for the one it names. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import Runtime
from paceline_operator.planner.runtimes.base import Capabilities, ForeignRuntime, engine_of
from paceline_operator.planner.runtimes.capabilities import lacking
from paceline_operator.planner.runtimes.custom import CUSTOM
from paceline_operator.planner.runtimes.llamacpp import LLAMACPP
from paceline_operator.planner.runtimes.nim import NIM
from paceline_operator.planner.runtimes.ollama import OLLAMA
from paceline_operator.planner.runtimes.sglang import SGLANG
from paceline_operator.planner.runtimes.tritonserver import TRITONSERVER
from paceline_operator.planner.runtimes.trtllm import TRTLLM
from paceline_operator.planner.runtimes.vllm import VLLM

FOREIGN: Mapping[Runtime, ForeignRuntime] = {
    runtime.name: runtime for runtime in (VLLM, SGLANG, LLAMACPP, OLLAMA, TRTLLM, TRITONSERVER, NIM, CUSTOM)
}
CAPABILITIES: Mapping[str, Capabilities | None] = {
    Runtime.PACELINE.value: None,
    **{name.value: runtime.capabilities for name, runtime in FOREIGN.items()},
}
"""None is our own engine: it has every field of the API."""

_OPTION = re.compile(r"--?[A-Za-z0-9].*", re.DOTALL)


def runtime_of(service: InferenceService) -> Runtime:
    return engine_of(service).runtime or Runtime.PACELINE


def foreign_of(service: InferenceService) -> ForeignRuntime | None:
    """The engine software of a service; None for our own."""
    return FOREIGN.get(runtime_of(service))


def runtime_problem(service: InferenceService) -> str | None:
    """Why the runtime cannot do what the spec asks for, as "spec.field: why"; None if it can."""
    problem = lacking(service, runtime_of(service).value, CAPABILITIES)
    runtime = foreign_of(service)
    if problem is not None or runtime is None:
        return problem
    if not runtime.image and engine_of(service).image is None:
        return f"spec.engine.image: runtime {runtime.name} has no image of its own; name one"
    return runtime.problem(service) or _reserved(service, runtime)


def _reserved(service: InferenceService, runtime: ForeignRuntime) -> str | None:
    for index, argument in enumerate(engine_of(service).extra_args or []):
        flag = argument.split("=", 1)[0]
        if _OPTION.fullmatch(flag) and flag.replace("_", "-") in {name.replace("_", "-") for name in runtime.reserved}:
            return f"spec.engine.extraArgs[{index}]: {flag} is set by the operator; remove it, or use the spec's field"
    return None
