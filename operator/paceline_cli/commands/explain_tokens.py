"""`paceline explain tokens REQUEST`: an answer's tokens, and rejected guesses, in the colours of how they came about.

For the terminal, as a page of its own, or as JSON. Standard library only.
"""

from __future__ import annotations

import html
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_cli.engine_call import post
from paceline_cli.errors import EXIT_DONE, BadInput

TIMEOUT_SECONDS = 600.0
# Kind to (terminal colour, page colour, what it means).
KINDS = {
    "accepted": ("42;30", "#b7e4c7", "guessed right: came without a step of its own"),
    "replacement": ("41;97", "#ffb3b3", "the target's token where a guess was wrong"),
    "bonus": ("44;97", "#bcd7ff", "on top, where all guesses were right"),
    "plain": ("0", "transparent", "no guess was made"),
}

# Terminal style, page colour, meaning.
REJECTED = ("9;31", "#c0392b", "guesses that were wrong, and those behind one")


@dataclass(frozen=True, slots=True)
class Options:
    """engine: base URL. page: HTML file to write. token_file: with the engine's bearer token."""

    engine: str
    page: Path | None
    token_file: Path | None
    as_json: bool


def run(path: str, options: Options) -> int:
    """The exit code; the report goes to stdout, or to the page."""
    tokens = _tokens(path, options)
    if options.as_json:
        sys.stdout.write(json.dumps({"tokens": tokens, "counts": counts(tokens)}) + "\n")
    elif options.page is not None:
        try:
            options.page.write_text(page(tokens), "utf-8")
        except OSError as error:
            raise BadInput(f"can't write --html {options.page}: {error.strerror}") from error
    else:
        sys.stdout.write(terminal(tokens))
    return EXIT_DONE


def _tokens(path: str, options: Options) -> list[dict[str, Any]]:
    try:
        body = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"can't read {path}: {error}: give a file with the JSON body of a request") from error
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise BadInput(f"{path} is no request: it has neither messages nor a prompt")
    body = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "n")}
    where = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    wanted = body | {"return_token_kinds": True}
    answer = post(options.engine, where, wanted, about=path, token_file=options.token_file, timeout=TIMEOUT_SECONDS)
    return answer["choices"][0]["token_kinds"]


def counts(tokens: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens of each kind, and guesses that were rejected."""
    found = Counter(str(token["kind"]) for token in tokens)
    return {kind: found[kind] for kind in KINDS} | {"rejected": sum(len(token["rejected"]) for token in tokens)}


def terminal(tokens: list[dict[str, Any]]) -> str:
    """Text with colours, rejected guesses struck out before what came in their place; then what the colours mean."""
    text = "".join(
        "".join(f"\x1b[{REJECTED[0]}m{_printable(guess)}\x1b[0m" for guess in token["rejected"])
        + f"\x1b[{KINDS[token['kind']][0]}m{_printable(token['token'])}\x1b[0m"
        for token in tokens
    )
    total = counts(tokens)
    lines = [f"\x1b[{colour}m{kind}\x1b[0m {total[kind]}: {what}" for kind, (colour, what) in _legend()]
    return "\n".join([text, "", *lines]) + "\n"


def page(tokens: list[dict[str, Any]]) -> str:
    """A page that needs nothing else."""
    body = "".join(
        "".join(
            f'<del title="rejected guess {number} of {len(token["rejected"])}">{html.escape(guess)}</del>'
            for number, guess in enumerate(token["rejected"], start=1)
        )
        + f'<span class="{token["kind"]}" title="{_title(token)}">{html.escape(token["token"])}</span>'
        for token in tokens
    )
    style = "".join(f".{kind} {{ background: {colour}; }}\n" for kind, (_, colour, _) in KINDS.items())
    style += f"del, .rejected {{ color: {REJECTED[1]}; text-decoration: line-through; }}\n"
    total = counts(tokens)
    rows = "".join(
        f'<li><span class="{kind}">{kind}</span> {total[kind]}: {html.escape(what)}</li>\n'
        for kind, (_, what) in _legend()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Tokens of one answer</title>\n'
        f"<style>\nbody {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; }}\n{style}</style></head>\n"
        f'<body><pre style="white-space: pre-wrap">{body}</pre>\n<ul>\n{rows}</ul></body></html>\n'
    )


def _legend() -> list[tuple[str, tuple[str, str]]]:
    """(kind, (terminal colour, what it means)), rejected guesses last."""
    kinds = [(kind, (colour, what)) for kind, (colour, _, what) in KINDS.items()]
    return [*kinds, ("rejected", (REJECTED[0], REJECTED[2]))]


def _title(token: dict[str, Any]) -> str:
    return f"{token['kind']}, {len(token['rejected'])} rejected" if token["rejected"] else str(token["kind"])


def _printable(text: str) -> str:
    """The model's text without what would steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
