"""`paceline explain prompt`: where two prompts part and why, by an engine's own tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline_cli.commands import explain_prompt
from paceline_cli.commands.prefix import Prompt, compare
from paceline_cli.errors import BadInput, CliError
from paceline_cli.main import app


def prompt(text: str, name: str = "a", **more: Any) -> Prompt:
    """One token a character."""
    return Prompt(**({"name": name, "token_ids": [ord(c) for c in text], "strings": list(text), "origin": {}} | more))


@pytest.mark.parametrize(
    ("a", "b", "common", "reused"),
    [
        ("abcdefgh", "abcdefgh", 8, 4),
        ("abcdefgh", "abcdefghi", 8, 8),
        ("abcdefgh", "abcdXfghi", 4, 4),
        ("abcdefgh", "abcXefgh", 3, 0),
        ("abcd", "abcdefgh", 4, 4),
        ("Xbcd", "abcd", 0, 0),
    ],
)
def test_full_blocks_before_the_first_difference_are_reused(a: str, b: str, common: int, reused: int) -> None:
    sharing = compare(prompt(a), prompt(b, "b"), 4)
    assert (sharing.num_common, sharing.num_reused) == (common, reused)
    assert (sharing.first_difference is None) == (a.startswith(b) or b.startswith(a))


def test_each_cause_is_named() -> None:
    def said(a: Prompt, b: Prompt) -> str:
        return " / ".join(compare(a, b, 4).reasons)

    assert "salts differ" in said(prompt("abcd", salt="x"), prompt("abcd"))
    assert compare(prompt("abcdefgh", salt="x"), prompt("abcdefghi"), 4).num_reused == 0
    assert "models or adapters differ" in said(prompt("abcd", model="x"), prompt("abcd"))
    assert "token 2 differs: a has 'c' (99) and b has 'X' (88), behind 'ab'" in said(prompt("abc"), prompt("abX", "b"))
    assert "last 2 equal tokens are not" in said(prompt("abcdefX"), prompt("abcdefY"))
    assert "last token of b is always computed" in said(prompt("abcd"), prompt("abcd", "b"))
    assert "tools differs" in said(prompt("ab", origin={"tools": "1"}), prompt("aX", origin={"tools": "2"}))
    merged = prompt("ab", "b", token_ids=[1], strings=["ab"])
    assert "cut into other tokens" in said(prompt("ab"), merged)


class Engine(BaseHTTPRequestHandler):
    """/tokenize with a token a character; messages are joined."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        known = {"model", "prompt", "messages", "return_token_strs", "tools"}
        status, answer = 200, {"tokens": [ord(c) for c in text], "token_strs": list(text)}
        if not body.keys() <= known or text == "bad":
            status, answer = 400, {"error": {"message": "no such thing"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def write(folder: Path, *contents: Any) -> list[str]:
    paths = [folder / f"{index}" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return [str(path) for path in paths]


def test_files_with_text_and_with_requests_are_compared(engine: str, tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "abcdefgh"}], "temperature": 1, "max_tokens": 5}
    paths = write(tmp_path, chat, {"prompt": "abcdefXh", "model": "m"}, "abcd")
    arguments = ["--engine", engine, "--block-size", "4"]
    result = CliRunner().invoke(app, ["explain", "prompt", *paths[:2], *arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) | {"num_common": 6, "num_reused": 4, "first_difference": 6} == json.loads(
        result.output
    )
    text = CliRunner().invoke(app, ["explain", "prompt", paths[2], paths[2], *arguments]).output
    assert "equal from the beginning: 4 tokens" in text


def test_bad_input_is_one_line(engine: str, tmp_path: Path) -> None:
    options = explain_prompt.Options(engine, 16, None, False)
    good, bad, odd = write(tmp_path, "x", "bad", {"prompt": [1, 2]})
    for path, message in [("/no/such", "can't read"), (bad, "no such thing"), (odd, "neither messages")]:
        with pytest.raises(BadInput, match=message):
            explain_prompt.run(good, path, options)
    with pytest.raises(CliError, match="check --engine"):
        explain_prompt.run(good, good, explain_prompt.Options("http://127.0.0.1:9", 16, None, False))
