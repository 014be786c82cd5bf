"""Request bodies: what is accepted, with bounds; what is known but not built is refused by name, as is the unknown.

A parameter that is not built may still be sent with the value that asks for nothing (best_of=1, store=false), as some
clients always do. Nothing is ignored silently but `user`, which OpenAI defines as having no effect on the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline_engine.server.constraints import GuidedFields
from paceline_engine.server.errors import invalid
from paceline_engine.server.kv_transfer import KVTransferParams, check_alone

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 64
MAX_N = 128
MAX_LOGPROBS = 20
MAX_BIASED = 1024
MAX_BAD_WORDS = 128
MAX_SALT_CHARS = 256
# Objects and lists in a body. A million take many seconds to check, in which the event loop serves nobody.
MAX_CONTAINERS = 100_000
# The core reads integers of 64 bits: whatever is larger is refused here, by name.
INT64 = 2**63

Count = Annotated[int, Field(ge=1, lt=INT64)]
TokenId = Annotated[int, Field(ge=0, lt=INT64)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StrictModel(BaseModel):
    """No unknown fields, no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(GuidedFields):
    """What chat and completions share. priority: lower runs first; *_deadline_ms: milliseconds from arrival.

    return_token_kinds: say of each token how speculation came by it. traffic_class: what lengths of guesses adapt by,
    and what --speculative-traffic-class switches. kv_transfer_params: whether another engine goes on with the request,
    or has begun it.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    min_tokens: int = Field(default=0, ge=0, lt=INT64)
    n: int = Field(default=1, ge=1, le=MAX_N)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=INT64)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    # Below, a logit divided by it may overflow.
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10.0)
    logit_bias: dict[str, Bias] = Field(default_factory=dict, max_length=MAX_BIASED)
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: list[Stop] = Field(default_factory=list, max_length=MAX_BAD_WORDS, fail_fast=True)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOPS, fail_fast=True)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Alternatives | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field(default="", max_length=MAX_SALT_CHARS)
    deadline_ms: Count | None = None
    ttft_deadline_ms: Count | None = None
    return_token_kinds: bool = False
    traffic_class: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    kv_transfer_params: KVTransferParams | None = None
    user: str | None = None

    @property
    def num_prompts(self) -> int:
        """Prompts of the request."""
        return 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each output token; None reports nothing."""
        raise NotImplementedError


Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]

# One problem is told; looking for all of a million would take minutes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Several = Annotated[list[Ids], Field(fail_fast=True)]


class CompletionRequest(GenerationRequest):
    prompt: str | Ids | Annotated[Texts | Several, Field(min_length=1, max_length=MAX_PROMPTS)]
    echo: bool = False
    logprobs: Alternatives | None = None
    add_special_tokens: bool = True

    @property
    def num_prompts(self) -> int:
        """As many as are given."""
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def num_logprobs(self) -> int | None:
        """As given."""
        return self.logprobs


# Known parameters that are not built, each with the values that ask for nothing.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": (),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

# Pydantic's names for a value of the right type and a wrong size.
_OUT_OF_BOUNDS = frozenset(
    {"too_long", "too_short", "string_too_long", "string_too_short"}
    | {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
)

R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """A request from its JSON body. Raises ApiError (400) that names the parameter."""
    _check_size(body)
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    fields = {name: value for name, value in raw.items() if value is not None}
    names = _names(kind)
    _refuse_unbuilt(names, fields)
    _drop_nulls(fields.get("messages"))
    known = {name: value for name, value in fields.items() if name in names or name not in _NOT_BUILT}
    try:
        request = kind.model_validate(known)
    except ValidationError as error:
        raise _first_problem(error) from error
    if isinstance(request, GenerationRequest):
        _check_together(request)
    return request


def _names(kind: type[BaseModel]) -> set[str]:
    """The body's names of a model's fields."""
    return {field.alias or name for name, field in kind.model_fields.items()}


def _check_together(request: GenerationRequest) -> None:
    """What no field can see alone."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true: leave it out or stream", "stream_options")
    check_alone(request.kv_transfer_params, stream=request.stream, n=request.n, num_prompts=request.num_prompts)
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs can't be streamed: leave it out or set stream=false", "prompt_logprobs")
    wrong = next((key for key in request.logit_bias if not (key.isascii() and key.isdigit() and len(key) < 20)), None)
    if wrong is not None:
        raise invalid(f"logit_bias: {wrong[:40]!r} is not a token id", "logit_bias")
    if request.constrained_by is not None:
        for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
            if getattr(request, name):
                raise invalid(f"{name} can't be kept under {request.constrained_by}: leave one out", name)


def _check_size(body: bytes) -> None:
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS:
        return
    # Brackets inside strings are text: without escaped quotes, every second part is one.
    bare = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    if bare.count(b"{") + bare.count(b"[") > MAX_CONTAINERS:
        raise invalid(f"the body has more than {MAX_CONTAINERS} objects and lists: send fewer", code="invalid_json")


def _refuse_unbuilt(names: set[str], fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name in names:
            continue
        if name not in _NOT_BUILT:
            raise invalid(f"unknown parameter {name!r}: leave it out", name, "unknown_parameter")
        if not any(_same(value, neutral) for neutral in _NOT_BUILT[name]):
            raise invalid(
                f"parameter {name!r} is not supported by this engine yet: leave it out", name, "unsupported_parameter"
            )


def _drop_nulls(messages: Any) -> None:
    """Drop the nulls of an assistant's message that a client echoes back."""
    for message in messages if isinstance(messages, list) else ():
        for name in [name for name, value in message.items() if value is None] if isinstance(message, dict) else ():
            del message[name]


def _same(value: Any, neutral: Any) -> bool:
    """Equality under which true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _first_problem(error: ValidationError) -> Exception:
    """The most telling of pydantic's problems, with a path such as messages[0].content."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    field = problems[0]["loc"][:1]
    # Of a union's alternatives, one whose type fits and whose bound does not is the one that was meant; else the one
    # that got furthest into the value.
    same = [problem for problem in problems if problem["loc"][:1] == field]
    problem = max(same, key=lambda p: (p["type"] in _OUT_OF_BOUNDS, len(p["loc"])))
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part != "str":
            path += f".{part}" if path else part
    what = {"missing": "is missing", "extra_forbidden": "is not a known parameter"}.get(problem["type"])
    return invalid(f"{path} {what}" if what else f"{path}: {problem['msg']}", path, "invalid_value")
