"""Request bodies: what is accepted, with bounds; what is known but not built is refused by name, as is the unknown.

A parameter that is not built may still be sent with the value that asks for nothing (n=1, logprobs=false), as some
clients always do. Nothing is ignored silently but `user`, which OpenAI defines as having no effect on the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline_engine.server.errors import invalid

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 64
# The core reads integers of 64 bits: whatever is larger is refused here, by name.
INT64 = 2**63

Count = Annotated[int, Field(ge=1, lt=INT64)]
TokenId = Annotated[int, Field(ge=0, lt=INT64)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    include_usage: bool = False


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Plain text; `developer` is OpenAI's newer name for `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({} if self.name is None else {"name": self.name})


class GenerationRequest(_Strict):
    """What chat and completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=INT64)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOPS)
    ignore_eos: bool = False
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None


Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per choice."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


# Known parameters that are not built, each with the values that ask for nothing.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": (),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_cache_key": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
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

R = TypeVar("R", bound=GenerationRequest)


def parse(kind: type[R], body: bytes) -> R:
    """A request from its JSON body. Raises ApiError (400) that names the parameter."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    fields = {name: value for name, value in raw.items() if value is not None}
    _refuse_unbuilt(kind, fields)
    _tidy_messages(fields.get("messages"))
    try:
        request = kind.model_validate({name: v for name, v in fields.items() if name not in _NOT_BUILT})
    except ValidationError as error:
        raise _first_problem(error) from error
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true: leave it out or stream", "stream_options")
    return request


def _refuse_unbuilt(kind: type[GenerationRequest], fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name in kind.model_fields:
            continue
        if name not in _NOT_BUILT:
            raise invalid(f"unknown parameter {name!r}: leave it out", name, "unknown_parameter")
        if not any(_same(value, neutral) for neutral in _NOT_BUILT[name]):
            raise invalid(
                f"parameter {name!r} is not supported by this engine yet: leave it out", name, "unsupported_parameter"
            )


def _tidy_messages(messages: Any) -> None:
    """Drop the nulls of an assistant's message that a client echoes back; refuse what belongs to tool calls."""
    if not isinstance(messages, list):
        return
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        for name in [name for name, value in message.items() if value is None]:
            del message[name]
        if "tool_calls" in message or message.get("role") in ("tool", "function"):
            where = f"messages[{index}]"
            raise invalid(f"{where}: tool calls are not supported yet", where, "unsupported_parameter")


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
