"""What `paceline kv` commands write: lines or JSON on stdout, progress on stderr where somebody watches."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

_Item = TypeVar("_Item")


def say(facts: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """One report."""
    sys.stdout.write(json.dumps(facts) + "\n" if as_json else "".join(f"{line}\n" for line in lines))


def progress(items: Iterable[_Item], what: str, total: int | None = None) -> Iterator[_Item]:
    """The items, with a bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    # rich takes a while to import, and only people look at it.
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=what, total=total, console=Console(stderr=True), transient=True)


def human(num_bytes: float) -> str:
    """Bytes for people: 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
