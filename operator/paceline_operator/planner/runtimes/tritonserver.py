"""Triton Inference Server behind its OpenAI frontend. Flags of release 26.01. Pure.

Everything about the engine is in the model repository: backend, limits and which versions are served (version_policy in
config.pbtxt). The served name must be the model's name in the repository.
"""

from __future__ import annotations

from paceline_api.names import MODEL_CACHE_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import Runtime
from paceline_operator.planner.pods import literal
from paceline_operator.planner.runtimes.base import (
    HOST,
    PORT,
    Capabilities,
    ForeignRuntime,
    Launch,
    Weights,
    extra_args,
    flags,
)
from paceline_operator.planner.runtimes.sources import source_of

_REPOSITORY = frozenset({Weights.REPOSITORY})
_FRONTEND = "/opt/tritonserver/python/openai/openai_frontend/main.py"


def _launch(service: InferenceService) -> Launch:
    source = source_of(service)
    repository = f"s3://{source.path}" if source.scheme == "s3" else source.local_path
    return Launch(
        command=("python3", _FRONTEND),
        args=(
            *flags({"model-repository": literal(repository), "host": HOST, "openai-port": PORT}),
            *extra_args(service),
        ),
        env={"HF_HOME": MODEL_CACHE_DIR},
        ready="/health/ready",
        live="/v1/models",
    )


TRITONSERVER = ForeignRuntime(
    name=Runtime.TRITONSERVER,
    image="nvcr.io/nvidia/tritonserver:26.01-vllm-python-py3",
    release="26.01",
    documentation="https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/client_guide/openai_readme.html",
    program="",
    capabilities=Capabilities(sources={"pvc": _REPOSITORY, "file": _REPOSITORY, "s3": _REPOSITORY}),
    reserved=frozenset({"--model-repository", "--host", "--openai-port"}),
    launch=_launch,
    notes=(
        "spec.model.source is a model repository; its config.pbtxt says which versions are served, and all else.",
        "spec.model.servedName must be the model's name in the repository. Chat needs --tokenizer=... in extraArgs.",
        "Its figure counts requests that wait, not those that run. It checks no token.",
    ),
)
