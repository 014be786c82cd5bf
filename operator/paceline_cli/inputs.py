"""From file arguments to API objects that know where they were written, with every problem of every file.

`load` never stops at the first mistake: `validate`, `render` and `up` show all of them at once. What is wrong inside
one object is `checks`, what is wrong between objects is `references`. Must not start anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline_api.kube import Manifest
from paceline_cli import yaml_source
from paceline_cli.errors import BadInput

STDIN = "-"
_STDIN_NAME = "<stdin>"
_SUFFIXES = (".yaml", ".yml", ".json")
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or warning, with the place to mend. `field` is empty where the whole document is meant."""

    file: str
    line: int
    column: int
    object: str
    field: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        # A syntax error has no field: the column leads to it.
        place += f":{self.column}" if not self.field and not self.object else ""
        return f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"


@dataclass(frozen=True, slots=True)
class SourceObject:
    """One API object and the document it came from. `prefix` is its path there: `items[3]` of a List."""

    manifest: Manifest
    file: str
    document: yaml_source.Document
    prefix: yaml_source.Path = ()

    @property
    def kind(self) -> str:
        return _text(self.manifest.get("kind"))

    @property
    def name(self) -> str:
        return _text(self._metadata().get("name"))

    @property
    def namespace(self) -> str:
        return _text(self._metadata().get("namespace")) or DEFAULT_NAMESPACE

    @property
    def label(self) -> str:
        """How messages call it: Kind/name."""
        return f"{self.kind}/{self.name}" if self.name else self.kind

    @property
    def line(self) -> int:
        return self.document.position_of(self.prefix).line

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def finding(self, path: yaml_source.Path, message: str) -> Finding:
        """A finding at a field of this object, given by its path from the object's root."""
        position = self.document.position_of(self.prefix + path)
        return Finding(self.file, position.line, position.column, self.label, dotted(path), message)

    def _metadata(self) -> dict[str, Any]:
        metadata = self.manifest.get("metadata")
        return metadata if isinstance(metadata, dict) else {}


@dataclass(slots=True)
class Loaded:
    """Everything that the files say."""

    objects: list[SourceObject] = field(default_factory=list[SourceObject])
    problems: list[Finding] = field(default_factory=list[Finding])
    files: list[str] = field(default_factory=list[str])


class UnreadableFiles(BadInput):
    """Some files cannot be read. `problems` has a line for each, and what was found wrong in the others."""

    def __init__(self, unreadable: list[tuple[str, str]], others: list[Finding]) -> None:
        super().__init__(*(f"{name}: {why}" for name, why in unreadable), *map(str, others))
        self.problems = [Finding(name, 1, 1, "", "", why) for name, why in unreadable] + others


def dotted(path: yaml_source.Path) -> str:
    """spec.model.adapters[0].name"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def load(arguments: Iterable[str]) -> Loaded:
    """Reads files, folders (their YAML and JSON files, by name) and `-`. Raises UnreadableFiles."""
    loaded = Loaded()
    unreadable: list[tuple[str, str]] = []
    for name, path in _expand(arguments, unreadable):
        try:
            text = _read(path)
        except (OSError, ValueError) as error:
            unreadable.append((name, _reason(error)))
            continue
        loaded.files.append(name)
        _read_text(name, text, loaded)
    if unreadable:
        raise UnreadableFiles(unreadable, loaded.problems)
    return loaded


def _expand(arguments: Iterable[str], unreadable: list[tuple[str, str]]) -> list[tuple[str, Path | None]]:
    found: dict[str, Path | None] = {}
    for argument in arguments:
        if argument == STDIN:
            found[_STDIN_NAME] = None
        elif Path(argument).is_dir():
            inside = [p for p in sorted(Path(argument).iterdir()) if p.suffix in _SUFFIXES and p.is_file()]
            if not inside:
                unreadable.append((argument, f"holds no {', '.join(_SUFFIXES)} file; name a file"))
            found.update({str(path): path for path in inside})
        else:
            found[argument] = Path(argument)
    return list(found.items())


def _read(path: Path | None) -> str:
    stream = sys.stdin.buffer if path is None else path.open("rb")
    with stream:
        data = stream.read(yaml_source.TEXT_BYTES_MAX + 1)
    if len(data) > yaml_source.TEXT_BYTES_MAX:
        raise ValueError(f"is larger than {yaml_source.TEXT_BYTES_MAX >> 20} MiB; split it")
    return data.decode("utf-8-sig")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file; check the path"
    if isinstance(error, PermissionError):
        return "may not be read; change its permissions or run as its owner"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error)


def _read_text(name: str, text: str, loaded: Loaded) -> None:
    try:
        for document in yaml_source.read_documents(text):
            for error in document.errors:
                loaded.problems.append(_finding(name, error))
            if isinstance(document.value, dict):
                loaded.objects.extend(_objects(name, document))
            elif document.value is not None:
                message = "is not an object; begin it with apiVersion, kind and metadata"
                loaded.problems.append(_finding(name, yaml_source.SourceError(document.position, message)))
    except yaml_source.Unreadable as unreadable:
        loaded.problems.append(_finding(name, unreadable.error))


def _objects(name: str, document: yaml_source.Document) -> list[SourceObject]:
    items = document.value.get("items")
    if document.value.get("kind") == "List" and isinstance(items, list):
        return [
            SourceObject(item if isinstance(item, dict) else {}, name, document, ("items", index))
            for index, item in enumerate(items)
        ]
    return [SourceObject(document.value, name, document)]


def _finding(name: str, error: yaml_source.SourceError) -> Finding:
    return Finding(name, error.position.line, error.position.column, "", dotted(error.path), error.message)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
