"""TensorRT-LLM: `trtllm-serve` on its PyTorch backend, which needs no engine built before. Flags of 1.2. Pure."""

from __future__ import annotations

import re

from paceline_api.names import MODEL_CACHE_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import Runtime
from paceline_operator.planner.pods import literal
from paceline_operator.planner.runtimes.base import (
    ANY,
    HOST,
    PORT,
    Capabilities,
    ForeignRuntime,
    Launch,
    Weights,
    chat_template_file,
    engine_of,
    extra_args,
    flags,
)
from paceline_operator.planner.runtimes.sources import source_of

_FOLDER = frozenset({Weights.FOLDER})
_OLD_TAG = re.compile(r":v?0\.[^/]*$")


def _launch(service: InferenceService) -> Launch:
    engine, source = engine_of(service), source_of(service)
    return Launch(
        command=("trtllm-serve",),
        args=(
            literal(source.repository if source.scheme == "hf" else source.local_path),
            *flags(
                {
                    "host": HOST,
                    "port": PORT,
                    "backend": "pytorch",
                    "revision": literal(source.revision) if source.revision else None,
                    "chat_template": chat_template_file(service),
                    "max_seq_len": engine.max_model_len,
                    "max_batch_size": engine.max_num_seqs,
                    "max_num_tokens": engine.max_num_batched_tokens,
                    "tp_size": engine.tensor_parallel_size,
                }
            ),
            *extra_args(service),
        ),
        env={"HF_HOME": MODEL_CACHE_DIR},
    )


def _problem(service: InferenceService) -> str | None:
    image = engine_of(service).image
    if image is not None and _OLD_TAG.search(image):
        return (
            f"spec.engine.image: {image} needs an engine built for each GPU; use release 1.0 or later, "
            "which loads the checkpoint itself"
        )
    return None


TRTLLM = ForeignRuntime(
    name=Runtime.TRTLLM,
    image="nvcr.io/nvidia/tensorrt-llm/release:1.2.0",
    release="1.2.0",
    documentation="https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/trtllm-serve.html",
    program="trtllm-serve",
    capabilities=Capabilities(
        sources={"hf": _FOLDER, "pvc": _FOLDER, "file": _FOLDER},
        fields={
            "model.revision": ANY,
            "model.chatTemplate": ANY,
            "engine.maxModelLen": ANY,
            "engine.maxNumSeqs": ANY,
            "engine.maxNumBatchedTokens": ANY,
            "engine.enablePrefixCaching": frozenset({True}),
            "engine.tensorParallelSize": ANY,
        },
        gpus_only=True,
    ),
    reserved=frozenset({"--host", "--port", "--backend", "--grpc", "--chat_template"}),
    launch=_launch,
    problem=_problem,
    notes=(
        "Releases before 1.0 need an engine built for each GPU and are refused; later ones load the checkpoint.",
        "Its share of GPU memory is of what the weights leave: --free_gpu_memory_fraction in extraArgs.",
        "It calls the model by its own name in answers. It tells no load and checks no token.",
    ),
)
