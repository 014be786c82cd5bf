"""One JSON request to an engine that runs, with its errors as the command's. Standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from paceline_cli.errors import BadInput, CliError


def post(engine: str, path: str, body: dict[str, Any], *, about: str, token_file: Path | None, timeout: float) -> Any:
    """The answer's JSON. engine: base URL. about: what the body was made of, for errors. timeout: seconds."""
    return _ask(engine, path, json.dumps(body).encode(), about, token_file, timeout)


def get(engine: str, path: str, *, token_file: Path | None, timeout: float) -> Any:
    """The answer's JSON. engine: base URL. timeout: seconds."""
    return _ask(engine, path, None, path, token_file, timeout)


def _ask(engine: str, path: str, body: bytes | None, about: str, token_file: Path | None, timeout: float) -> Any:
    headers = {"content-type": "application/json"}
    if token_file is not None:
        try:
            headers["authorization"] = f"Bearer {token_file.read_text('utf-8').strip()}"
        except OSError as error:
            raise BadInput(f"can't read --internal-token-file {token_file}: {error.strerror}") from error
    try:
        request = urllib.request.Request(engine.rstrip("/") + path, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise BadInput(f"{about}: the engine refuses it: {_reason(error)}") from error
    except (OSError, ValueError) as error:
        raise CliError(f"can't ask the engine at {engine}: {error}: check --engine and that it runs") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"
