"""What the planner knows of an engine software: what of the API it has, and how its container is started. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from paceline_api.kube import Manifest
from paceline_api.names import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_KEY, ENV_HOST, PORT_HTTP, port_env
from paceline_api.v1alpha1 import InferenceService
from paceline_api.v1alpha1.inference_service import EngineSpec, Runtime
from paceline_operator.planner.pods import http_probe, literal

HOST = f"$({ENV_HOST})"
PORT = f"$({port_env(PORT_HTTP)})"
# Where several engines need a number and the spec may leave it open.
DRAFT_TOKENS = 4
ANY: frozenset[object] | None = None


class Weights(StrEnum):
    """What a source names. REPOSITORY is a folder in an engine's own layout; IMAGE is what the image brings."""

    FOLDER = "a Hugging Face folder"
    GGUF = "a .gguf file"
    REPOSITORY = "a model repository"
    IMAGE = "the image's own model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What of the API an engine has; everything else is refused by name.

    sources: what each scheme may name. fields: path below `spec`, such as engine.maxModelLen, to the values that it has
    (ANY for all). Fields that are not listed may still have the value that asks for nothing (see `capabilities`).
    """

    sources: Mapping[str, frozenset[Weights]]
    fields: Mapping[str, frozenset[object] | None] = field(default_factory=dict[str, "frozenset[object] | None"])
    gpus_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one engine container is started. Without a command the image's own entrypoint gets the arguments.

    init: (name, command) of containers that run before it, in the same image with the same variables and volumes.
    token_env: the variable that gets the internal token, for engines that read it there. token_file: it is mounted.
    """

    args: tuple[str, ...]
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    init: tuple[tuple[str, tuple[str, ...]], ...] = ()
    token_env: str = ""
    token_file: bool = False
    ready: str = "/health"
    live: str = "/health"
    probe_timeout_s: int = 2
    startup: Manifest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRuntime:
    """One engine software. `image` "" means that the spec must name one.

    release and documentation: for which release the flags are, and where they are documented. program: what
    `paceline up` runs of it; "" where it exists as an image only. reserved: flags that the operator sets itself.
    problem: what the fields alone cannot say, as "spec.field: why"; None if nothing.
    """

    name: Runtime
    image: str
    release: str
    documentation: str
    program: str
    capabilities: Capabilities
    reserved: frozenset[str]
    launch: Callable[[InferenceService], Launch]
    problem: Callable[[InferenceService], str | None] = lambda service: None
    notes: tuple[str, ...] = ()


def engine_of(service: InferenceService) -> EngineSpec:
    return service.spec.engine or EngineSpec()


def chat_template_file(service: InferenceService) -> str | None:
    """Where the pod has the spec's chat template, if there is one."""
    return None if service.spec.model.chat_template is None else f"{CHAT_TEMPLATE_DIR}/{CHAT_TEMPLATE_KEY}"


def extra_args(service: InferenceService) -> tuple[str, ...]:
    """The spec's own arguments, safe from expansion."""
    return tuple(literal(argument) for argument in engine_of(service).extra_args or ())


def flags(values: Mapping[str, object | None]) -> tuple[str, ...]:
    """`--name=value` for each value that is set; texts of users must come as literals."""
    return tuple(f"--{name}={value}" for name, value in values.items() if value is not None)


def startup_probe(path: str, budget_s: int, timeout_s: int) -> Manifest:
    """Tries every second for `budget_s` seconds."""
    return http_probe(path, PORT_HTTP, period_s=1, timeout_s=timeout_s, failures=budget_s)
