"""Which fields of a spec an engine lacks, and which engines have them.

A field that an engine does not have is never ignored: it is refused with its name. Values that ask for nothing (none,
auto, 1) are every engine's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline_api.v1alpha1 import InferenceService
from paceline_operator.planner.runtimes.base import Capabilities, Weights, engine_of
from paceline_operator.planner.runtimes.sources import Source, parse_source, source_of

# Every engine has these, or they are checked elsewhere.
_COMMON = frozenset({"runtime", "image", "extraArgs", "resources", "podTemplate"})
_NEUTRAL: Mapping[str, frozenset[object]] = {
    "engine.batching": frozenset({"continuous"}),
    "engine.kvCacheDtype": frozenset({"auto"}),
    "engine.quantization": frozenset({"none"}),
    "engine.tensorParallelSize": frozenset({1}),
    "engine.speculative.method": frozenset({"none"}),
    "engine.speculative.acceptance": frozenset({"exact"}),
}
_HUGGING_FACE = frozenset({Weights.FOLDER, Weights.GGUF})
PACELINE_SOURCES: Mapping[str, frozenset[Weights]] = dict.fromkeys(
    ("hf", "s3", "pvc", "file", "package"), _HUGGING_FACE
)
"""What our own engine loads; it has every field of the API."""


def asked(service: InferenceService) -> Iterator[tuple[str, object]]:
    """(path below spec, value) of every optional field that is set, in the order of the API."""
    model = service.spec.model
    if model.revision is not None or source_of(service).revision is not None:
        yield "model.revision", source_of(service).revision
    if model.chat_template is not None:
        yield "model.chatTemplate", model.chat_template
    for name, value in engine_of(service).model_dump(mode="json", by_alias=True, exclude_none=True).items():
        if name == "speculative":
            yield from ((f"engine.speculative.{key}", inner) for key, inner in value.items())
        elif name not in _COMMON:
            yield f"engine.{name}", value
    if service.spec.kv_store_ref is not None:
        yield "kvStoreRef", service.spec.kv_store_ref.name


def has(capabilities: Capabilities | None, path: str, value: object) -> bool:
    """Whether an engine has this value of a field; None is our own, which has all."""
    if capabilities is None or (isinstance(value, str | int | bool) and value in _NEUTRAL.get(path, ())):
        return True
    if path not in capabilities.fields:
        return False
    allowed = capabilities.fields[path]
    return allowed is None or value in allowed


def loads(capabilities: Capabilities | None, source: Source) -> bool:
    """Whether an engine loads what a source names."""
    sources = PACELINE_SOURCES if capabilities is None else capabilities.sources
    found = sources.get(source.scheme, frozenset())
    return source.weights in found or (Weights.REPOSITORY in found and source.weights is Weights.FOLDER)


def lacking(service: InferenceService, name: str, known: Mapping[str, Capabilities | None]) -> str | None:
    """The first thing the engine `name` lacks, as "spec.field: why"; None if it has everything that is asked for."""
    capabilities = known[name]
    source = source_of(service)
    if not loads(capabilities, source):
        where = f"{source.weights.value} from {source.scheme}://"
        able = [other for other, abilities in known.items() if loads(abilities, source)]
        return f"spec.model.source: {name} does not load {where}; {_able(able)}"
    for path, value in asked(service):
        if not has(capabilities, path, value):
            able = [other for other, abilities in known.items() if has(abilities, path, value)]
            return f"spec.{path}: {_shown(path, value, name, capabilities)}; {_able(able)}, or remove the field"
    speculative = engine_of(service).speculative
    draft = speculative.draft_source if speculative is not None else None
    if draft is not None and not loads(capabilities, parse_source(draft)):
        return f"spec.engine.speculative.draftSource: {name} does not load this; use a source as for spec.model.source"
    if capabilities is not None and capabilities.gpus_only and not engine_of(service).asks_for_gpus:
        return f"spec.engine.resources.limits: {name} runs on GPUs only; ask for some, such as nvidia.com/gpu: 1"
    return None


def _shown(path: str, value: object, name: str, capabilities: Capabilities | None) -> str:
    nothing: frozenset[object] = frozenset()
    listed = nothing if capabilities is None else capabilities.fields.get(path) or nothing
    choices = listed | _NEUTRAL.get(path, nothing)
    if not choices:
        return f"runtime {name} has no {path.rpartition('.')[2]}"
    return f"runtime {name} has no {value!r}, only {_listed(choices)}"


def _listed(values: frozenset[object]) -> str:
    texts = sorted((str(value).lower() if isinstance(value, bool) else str(value) for value in values), key=_in_order)
    numbers = [int(text) for text in texts if text.isdecimal()]
    is_range = len(numbers) == len(texts) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{texts[0]} to {texts[-1]}" if is_range else ", ".join(texts)


def _in_order(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (0, text)


def _able(names: list[str]) -> str:
    if not names:
        return "no runtime can"
    return f"use runtime {' or '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}"
