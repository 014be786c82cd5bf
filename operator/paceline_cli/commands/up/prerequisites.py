"""What must be there before `paceline up` starts anything. Locates packages; reads models up to their weights."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline_api.v1alpha1 import InferenceService, KVStore, KVStoreSpec, Resource
from paceline_api.v1alpha1.inference_service import Runtime
from paceline_api.v1alpha1.kv_store import Encoding
from paceline_cli.inputs import SourceObject
from paceline_operator.planner.runtimes.registry import foreign_of
from paceline_operator.planner.runtimes.sources import source_of

_EXTRAS = {
    "engine": ("torch", "msgspec", "zmq", "tokenizers", "safetensors", "gguf", "fastapi", "uvicorn", "typer"),
    "router": ("aiohttp", "fastapi", "uvicorn", "kubernetes", "prometheus_client", "typer"),
    "operator": ("kubernetes", "prometheus_client"),
    "cli": ("psutil", "rich"),
}
"""Extra -> modules by which its absence is noticed."""
_PROGRAMS = ("paceline-engine", "paceline-router")
_SERVER = "paceline-kvstore"
_STORE_EXTRAS: dict[str, tuple[Callable[[KVStoreSpec], bool], tuple[str, ...]]] = {
    "s3": (lambda spec: spec.s3 is not None, ("boto3",)),
    "encryption": (lambda spec: spec.encryption is not None, ("cryptography",)),
    "compression": (lambda spec: spec.encoding is Encoding.ZSTD, ("zstandard",)),
    "kvserver": (lambda spec: spec.on_nodes, ("prometheus_client", "typer", "numpy", "xxhash")),
}
"""Extra -> whether a KVStore needs it, and modules by which its absence is noticed."""


def missing_packages() -> list[str]:
    """One line for each extra that is not installed as a whole."""
    lines: list[str] = []
    for extra, modules in _EXTRAS.items():
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        if absent:
            lines.append(f"the {extra}'s packages are missing ({', '.join(absent)}): pip install 'paceline[{extra}]'")
    return lines


def missing_for_stores(typed: Iterable[tuple[SourceObject, Resource]], bin_dir: Path) -> list[str]:
    """One line, with the object's place, for each package and program that a KVStore needs and that is not here."""
    lines: list[str] = []
    for item, resource in typed:
        if not isinstance(resource, KVStore):
            continue
        for extra, (needs, modules) in _STORE_EXTRAS.items():
            absent = [name for name in modules if importlib.util.find_spec(name) is None]
            if absent and needs(resource.spec):
                why = f"it needs packages that are missing ({', '.join(absent)}): pip install 'paceline[{extra}]'"
                lines.append(str(item.finding(("spec",), why)))
        if resource.spec.on_nodes and not (bin_dir / _SERVER).exists():
            lines.append(str(item.finding(("spec", "mode"), f"{_SERVER} is not in {bin_dir}: install Paceline again")))
    return lines


def missing_programs(bin_dir: Path) -> list[str]:
    """Programs of the product that are not beside this Python."""
    return [
        f"{name} is not in {bin_dir}: install Paceline into this environment again (pip install paceline)"
        for name in _PROGRAMS
        if not (bin_dir / name).exists()
    ]


def missing_models(typed: Iterable[tuple[SourceObject, Resource]]) -> list[str]:
    """One line, with the field's place, for each model that is not on this machine or not whole."""
    from paceline_engine.models.errors import ModelError
    from paceline_engine.models.loader import check_model, default_cache_dir
    from paceline_engine.models.source import resolve

    lines: list[str] = []
    for item, resource in typed:
        if isinstance(resource, InferenceService) and foreign_of(resource) is None:
            for path, source in _sources(resource).items():
                try:
                    check_model(resolve(source), default_cache_dir())
                except ModelError as error:
                    lines.append(str(item.finding(path, str(error))))
    return lines


def missing_engines(typed: Iterable[tuple[SourceObject, Resource]], bin_dir: Path) -> list[str]:
    """One line for each engine of other software, or its local model, that is not on this machine."""
    lines: list[str] = []
    path = f"{bin_dir}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    for item, resource in typed:
        runtime = foreign_of(resource) if isinstance(resource, InferenceService) else None
        if runtime is None or not isinstance(resource, InferenceService):
            continue
        if not runtime.program and runtime.name is not Runtime.CUSTOM:
            why = f"{runtime.name} comes as an image only; run it in a cluster"
            lines.append(str(item.finding(("spec", "engine", "runtime"), why)))
        elif runtime.program and shutil.which(runtime.program, path=path) is None:
            why = f"{runtime.program} is not on PATH: install {runtime.name}"
            lines.append(str(item.finding(("spec", "engine", "runtime"), why)))
        source = source_of(resource)
        if source.scheme == "pvc":
            lines.append(
                str(item.finding(("spec", "model", "source"), "a claim can't be mounted here; use file:///PATH"))
            )
        if source.scheme == "file" and not Path(source.local_path).exists():
            lines.append(str(item.finding(("spec", "model", "source"), f"there is no {source.local_path}")))
    return lines


def _sources(service: InferenceService) -> dict[tuple[str, ...], str]:
    speculative = service.spec.engine and service.spec.engine.speculative
    draft = speculative and speculative.draft_source
    sources: dict[tuple[str, ...], str] = {("spec", "model", "source"): service.spec.model.source}
    return sources | ({("spec", "engine", "speculative", "draftSource"): draft} if draft else {})
