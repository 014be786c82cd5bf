"""NVIDIA NIM for LLMs: `nim-serve`, which passes vLLM's flags on. Variables of release 2.0. Pure.

With image://NAME it serves the model that its image is for; else it must be the model-free image.
"""

from __future__ import annotations

from paceline_api.names import MODEL_CACHE_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import Runtime
from paceline_operator.planner.pods import literal
from paceline_operator.planner.runtimes import vllm
from paceline_operator.planner.runtimes.base import (
    PORT,
    Capabilities,
    ForeignRuntime,
    Launch,
    Weights,
    extra_args,
)
from paceline_operator.planner.runtimes.sources import source_of

_FOLDER = frozenset({Weights.FOLDER})


def _launch(service: InferenceService) -> Launch:
    source = source_of(service)
    model = {
        "hf": f"hf://{source.repository}",
        "s3": f"s3://{source.path}",
        "image": "",
    }.get(source.scheme, source.local_path)
    env = {"NIM_SERVER_PORT": PORT, "NIM_CACHE_PATH": MODEL_CACHE_DIR, "HF_HOME": MODEL_CACHE_DIR}
    return Launch(
        # The image's entrypoint sets up what its server needs.
        args=("nim-serve", *vllm.model_flags(service), *extra_args(service)),
        env=env | ({"NIM_MODEL_PATH": literal(model)} if model else {}),
        ready="/v1/health/ready",
        live="/v1/health/live",
    )


NIM = ForeignRuntime(
    name=Runtime.NIM,
    image="",
    release="2.0",
    documentation="https://docs.nvidia.com/nim/large-language-models/latest/reference/environment-variables.html",
    program="",
    capabilities=Capabilities(
        sources={
            "hf": _FOLDER,
            "pvc": _FOLDER,
            "file": _FOLDER,
            "s3": _FOLDER,
            "image": frozenset({Weights.IMAGE}),
        },
        fields={path: values for path, values in vllm.FIELDS.items() if path != "model.revision"},
        gpus_only=True,
    ),
    reserved=vllm.RESERVED,
    launch=_launch,
    notes=(
        "spec.engine.image is the model's own image with source image://NAME, else the model-free one.",
        "credentialsSecretRef holds NGC_API_KEY, HF_TOKEN or AWS_*. It checks no token.",
        "Older releases have its figures without the prefix vllm:; routers read either.",
    ),
)
