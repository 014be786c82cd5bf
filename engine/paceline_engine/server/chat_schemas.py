"""The body of a chat request: messages, tools, and how the template is rendered."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline_engine.server.errors import invalid
from paceline_engine.server.schemas import Alternatives, Count, GenerationRequest, StrictModel

MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class CalledFunction(StrictModel):
    name: Name
    arguments: str


class ToolCall(StrictModel):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_call_id: str | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """What templates expect: plain text, arguments as an object; `developer` is OpenAI's newer name for `system`.

        where: the message's path, for errors. Raises ApiError (400).
        """
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise invalid(f"{where}.content is missing", f"{where}.content", "invalid_value")
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"{where}.tool_calls is only for role assistant", f"{where}.tool_calls", "invalid_value")
        if (self.tool_call_id is None) == (self.role == "tool"):
            what = "is missing" if self.role == "tool" else "is only for role tool"
            raise invalid(f"{where}.tool_call_id {what}", f"{where}.tool_call_id", "invalid_value")
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        made: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        if self.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call, f"{where}.tool_calls[{i}]")},
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return made


def _arguments(call: ToolCall, where: str) -> dict[str, Any]:
    path = f"{where}.function.arguments"
    try:
        value = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"{path} is not valid JSON: {error}", path, "invalid_value") from error
    if not isinstance(value, dict):
        raise invalid(f"{path} is not a JSON object", path, "invalid_value")
    return value


class FunctionTool(StrictModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class TemplateFields(StrictModel):
    """What a chat template is rendered from; also of /tokenize."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


class ChatRequest(TemplateFields, GenerationRequest):
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @property
    def num_logprobs(self) -> int | None:
        """top_logprobs, where logprobs are on."""
        return (self.top_logprobs or 0) if self.logprobs else None
