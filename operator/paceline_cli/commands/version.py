"""`paceline version`: which versions of the product and of the API this installation has."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata

from paceline_api import API_VERSION


def product_version() -> str:
    """Version of the installed distribution."""
    return metadata.version("paceline")


def run(*, as_json: bool) -> int:
    """Writes one line, or one JSON object."""
    facts = {"version": product_version(), "apiVersion": API_VERSION, "python": platform.python_version()}
    text = (
        json.dumps(facts) if as_json else f"paceline {facts['version']} (API {API_VERSION}, Python {facts['python']})"
    )
    sys.stdout.write(text + "\n")
    return 0
