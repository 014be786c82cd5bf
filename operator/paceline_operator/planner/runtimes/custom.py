"""Any server with OpenAI's API: image, command and probes come from the spec's podTemplate. Pure.

It must listen on the port in PACELINE_PORT_HTTP, on every address, and answer /health, unless podTemplate has probes of
its own. PACELINE_MODEL has the source, or the path where a volume's is mounted, PACELINE_SERVED_NAME the model's name.
"""

from __future__ import annotations

from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import Runtime
from paceline_operator.planner.pods import literal
from paceline_operator.planner.runtimes.base import ANY, Capabilities, ForeignRuntime, Launch, Weights, extra_args
from paceline_operator.planner.runtimes.sources import source_of

_HUGGING_FACE = frozenset({Weights.FOLDER, Weights.GGUF})


def _launch(service: InferenceService) -> Launch:
    source = source_of(service)
    model = source.local_path if source.scheme in ("pvc", "file") else service.spec.model.source
    names = {"PACELINE_MODEL": literal(model), "PACELINE_SERVED_NAME": literal(service.served_name())}
    return Launch(args=extra_args(service), env=names)


CUSTOM = ForeignRuntime(
    name=Runtime.CUSTOM,
    image="",
    release="",
    documentation="",
    program="",
    capabilities=Capabilities(
        sources={
            **dict.fromkeys(("hf", "s3", "pvc", "file"), _HUGGING_FACE),
            "image": frozenset({Weights.IMAGE}),
        },
        fields={"model.chatTemplate": ANY},
    ),
    reserved=frozenset(),
    launch=_launch,
    notes=(
        "podTemplate may set the command, arguments, probes and hooks of container `engine`.",
        "A chat template is a file in /etc/paceline/chat-template; nothing else of the spec reaches the server.",
    ),
)
