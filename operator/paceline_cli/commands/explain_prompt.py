"""`paceline explain prompt A B`: which tokens two prompts share, where they part, and why no more is reused.

A prompt is a file with plain text, or with the JSON body of a chat or completion request. A running engine tokenises
it, so templates and special tokens are those that count. Standard library only.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline_cli.commands.prefix import Prompt, Sharing, compare
from paceline_cli.engine_call import post
from paceline_cli.errors import EXIT_DONE, BadInput

TIMEOUT_SECONDS = 30.0
# What /tokenize takes of a request; the rest has no part in the prompt.
_CHAT_FIELDS = ("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")
_CHAT_FIELDS += ("continue_final_message", "add_special_tokens")
_ORIGIN = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class Options:
    """engine: base URL. block_size: tokens. token_file: with the engine's bearer token."""

    engine: str
    block_size: int
    token_file: Path | None
    as_json: bool


def run(first: str, second: str, options: Options) -> int:
    """The exit code; the explanation goes to stdout."""
    a, b = _tokenized(first, options), _tokenized(second, options)
    sharing = compare(a, b, options.block_size)
    sys.stdout.write(json.dumps(asdict(sharing)) + "\n" if options.as_json else _text(sharing, a, b))
    return EXIT_DONE


def _text(sharing: Sharing, a: Prompt, b: Prompt) -> str:
    lines = [
        f"{a.name}: {sharing.num_tokens[0]} tokens; {b.name}: {sharing.num_tokens[1]} tokens",
        f"equal from the beginning: {sharing.num_common} tokens",
        f"reused for {b.name} once {a.name} is cached: {sharing.num_reused} tokens "
        f"({sharing.num_reused // sharing.block_size} blocks of {sharing.block_size})",
    ]
    return "\n".join(lines + [f"- {reason}" for reason in sharing.reasons]) + "\n"


def _tokenized(path: str, options: Options) -> Prompt:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"can't read {path}: {error}: give a file with text or with the JSON body of a request"
        ) from error
    body = _request(text)
    if "messages" in body:
        asked = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    elif isinstance(body.get("prompt"), str):
        asked = {name: body[name] for name in ("model", "prompt", "add_special_tokens") if body.get(name) is not None}
    else:
        raise BadInput(f"{path}: the request has neither messages nor a prompt that is one text")
    wanted = asked | {"return_token_strs": True}
    answer = post(
        options.engine, "/tokenize", wanted, about=path, token_file=options.token_file, timeout=TIMEOUT_SECONDS
    )
    return Prompt(
        name=path,
        token_ids=answer["tokens"],
        strings=answer["token_strs"],
        salt=str(body.get("cache_salt") or ""),
        model=str(body.get("model") or ""),
        origin={name: json.dumps(body[name]) for name in _ORIGIN if body.get(name)},
    )


def _request(text: str) -> dict[str, Any]:
    """The text as a request body; plain text is a prompt."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    is_request = isinstance(body, dict) and ("messages" in body or "prompt" in body)
    return body if is_request else {"prompt": text}  # type: ignore[return-value]
