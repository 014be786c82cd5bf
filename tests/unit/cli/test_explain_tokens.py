"""`paceline explain tokens`: counts, colours and a page that is safe whatever the model wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline_cli.commands import explain_tokens
from paceline_cli.commands.explain_tokens import Options, counts, page, terminal
from paceline_cli.errors import BadInput

TOKENS: list[dict[str, Any]] = [
    {"token": "<b>", "kind": "plain", "rejected": []},
    {"token": " right", "kind": "accepted", "rejected": []},
    {"token": " instead", "kind": "replacement", "rejected": [" wrong", " <i>", "\x1b[2J"]},
    {"token": " more", "kind": "bonus", "rejected": []},
]


def test_the_report_counts_and_colours_each_kind() -> None:
    assert counts(TOKENS) == {"accepted": 1, "replacement": 1, "bonus": 1, "plain": 1, "rejected": 3}
    text = terminal(TOKENS)
    assert "\x1b[42;30m right\x1b[0m" in text
    assert "\x1b[9;31m wrong\x1b[0m\x1b[9;31m <i>\x1b[0m\x1b[9;31m\ufffd[2J\x1b[0m\x1b[41;97m instead\x1b[0m" in text
    assert "\x1b[9;31mrejected\x1b[0m 3: " in text
    made = page(TOKENS)
    assert '<span class="plain" title="plain">&lt;b&gt;</span>' in made
    assert '<del title="rejected guess 1 of 3"> wrong</del><del title="rejected guess 2 of 3"> &lt;i&gt;</del>' in made
    assert 'title="replacement, 3 rejected"> instead<' in made
    assert '<span class="rejected">rejected</span> 3: ' in made


def test_a_request_is_sent_once_without_streaming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, dict[str, Any]]] = []

    def post(_engine: str, path: str, body: dict[str, Any], **_: Any) -> Any:
        sent.append((path, body))
        return {"choices": [{"token_kinds": TOKENS}]}

    monkeypatch.setattr(explain_tokens, "post", post)
    request = tmp_path / "r.json"
    request.write_text(json.dumps({"model": "m", "prompt": "a", "stream": True, "n": 2}))
    explain_tokens.run(str(request), Options("http://e", None, None, True))
    assert sent == [("/v1/completions", {"model": "m", "prompt": "a", "return_token_kinds": True})]
    assert json.loads(capsys.readouterr().out)["counts"]["rejected"] == 3
    explain_tokens.run(str(request), Options("http://e", tmp_path / "p.html", None, False))
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("text", ["", "[]", '{"model": "m"}'])
def test_what_is_no_request_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BadInput):
        explain_tokens.run(str(tmp_path / "r.json"), Options("http://e", None, None, False))
