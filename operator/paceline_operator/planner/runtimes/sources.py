"""What a model's source says: scheme, repository, file, revision, and where a mounted one is in the container. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_api.names import MODEL_VOLUME_DIR
from paceline_api.v1alpha1 import InferenceService
from paceline_operator.planner.runtimes.base import Weights

_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed source. `repository` is ORG/NAME of hf://; `path` what follows: a file in it, a path, bucket/prefix."""

    scheme: str
    repository: str
    path: str
    revision: str | None

    @property
    def weights(self) -> Weights:
        if self.scheme == "image":
            return Weights.IMAGE
        return Weights.GGUF if self.path.lower().endswith(_GGUF) else Weights.FOLDER

    @property
    def local_path(self) -> str:
        """Absolute path in the container, of pvc:// and file://."""
        if self.scheme == "pvc":
            return f"{MODEL_VOLUME_DIR}/{self.path}"
        path = self.path.lstrip("/")
        # A pod's /tmp is a volume, so this is a file of a laptop; its node must not look for it in that volume.
        return f"/./{path}" if path.startswith("tmp/") else f"/{path}"


def parse_source(text: str, revision: str | None = None) -> Source:
    """Reads SCHEME://REST as the API allows it. A revision written into an hf:// source wins."""
    scheme, _, rest = text.partition("://")
    if scheme != "hf":
        path = rest.partition("/")[2] if scheme == "pvc" else rest
        return Source(scheme, "", path, None)
    rest, _, written = rest.partition("@")
    parts = rest.split("/")
    return Source(scheme, "/".join(parts[:2]), "/".join(parts[2:]), written or revision)


def source_of(service: InferenceService) -> Source:
    model = service.spec.model
    return parse_source(model.source, model.revision)
