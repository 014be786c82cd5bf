"""Reads YAML as the API server's clients read it, and remembers on which line each field stands.

Why not `yaml.safe_load`: it keeps the last of two equal keys, turns dates into objects and forgets lines. Values follow
YAML 1.1 as kubectl does (`yes` is true), except that dates stay text. JSON files are read by the same rules. Pure: text
in, documents out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

Path = tuple[int | str, ...]

TEXT_BYTES_MAX = 4 * 1024 * 1024
"""Larger files are refused: the API server takes no object above 3 MiB."""
NODES_MAX = 200_000
"""Fields of one document with aliases expanded; stops documents that grow without end."""
DEPTH_MAX = 100

_TAG = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_TAG}merge"
_SCALAR_TAGS = frozenset({f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "value")})


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a file, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class SourceError:
    """One thing that makes the text unreadable, with what to do in the message."""

    position: Position
    message: str
    path: Path = ()


@dataclass(slots=True)
class Document:
    """One YAML document. `errors` are duplicate keys and values that JSON does not have; `value` is what was left."""

    value: Any
    position: Position
    positions: dict[Path, Position] = field(default_factory=dict[Path, Position])
    errors: list[SourceError] = field(default_factory=list[SourceError])

    def position_of(self, path: Path) -> Position:
        """Where the field stands, or the nearest enclosing field that the text has."""
        for length in range(len(path), 0, -1):
            found = self.positions.get(path[:length])
            if found is not None:
                return found
        return self.position


class Unreadable(Exception):
    """The text is not YAML from here on."""

    def __init__(self, error: SourceError) -> None:
        super().__init__(error.message)
        self.error = error


def read_documents(text: str) -> Iterator[Document]:
    """The documents of a text, empty ones left out. Raises Unreadable where the syntax breaks."""
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise Unreadable(_syntax_error(error, text)) from None
    try:
        while True:
            try:
                node = loader.get_node() if loader.check_node() else None
            except yaml.YAMLError as error:
                raise Unreadable(_syntax_error(error, text)) from None
            except RecursionError:
                message = f"fields are nested deeper than {DEPTH_MAX} levels; flatten them"
                raise Unreadable(SourceError(Position(1, 1), message)) from None
            if node is None:
                return
            document = _Reader(loader).document(node)
            if document.value is not None or document.errors:
                yield document
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """The pure-Python loader: libyaml's messages say less, and files are small."""


# Kubernetes has no dates: `2026-01-31` in an annotation stays the text it is.
_Loader.add_constructor(f"{_TAG}timestamp", yaml.SafeLoader.construct_yaml_str)
_Loader.add_constructor(f"{_TAG}value", yaml.SafeLoader.construct_yaml_str)


class _Refused(Exception):
    """A node that becomes no JSON value."""

    def __init__(self, node: yaml.Node, message: str) -> None:
        super().__init__(message)
        self.node = node


class _Reader:
    """Turns the nodes of one document into plain values."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._nodes = 0
        self._open: set[int] = set()
        self._positions: dict[Path, Position] = {}
        self._errors: list[SourceError] = []

    def document(self, node: yaml.Node) -> Document:
        position = _position(node)
        try:
            value = self._value(node, ())
        except _Refused as refused:
            self._errors.append(SourceError(_position(refused.node), str(refused)))
            value = None
        return Document(value, position, self._positions, self._errors)

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise _Refused(node, f"the document has more than {NODES_MAX} fields; split it or use fewer aliases")
        if len(path) > DEPTH_MAX:
            raise _Refused(node, f"fields are nested deeper than {DEPTH_MAX} levels; flatten them")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            raise _Refused(node, "an alias refers to a field that contains it; write the value out")
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            raise _Refused(node, f"the tag {_short_tag(node.tag)} has no JSON value; write a plain mapping or list")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return self._sequence(cast("yaml.SequenceNode", node), path)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        try:
            return _json_scalar(self._loader, node)
        except ValueError as error:
            self._errors.append(SourceError(_position(node), f"{error}; write a plain or quoted value", path))
            return None

    def _sequence(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        items: list[Any] = []
        for index, item in enumerate(node.value):
            self._positions[(*path, index)] = _position(item)
            items.append(self._value(item, (*path, index)))
        return items

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        self._refuse_duplicates(node, path)
        if any(key.tag == _MERGE_TAG for key, _ in node.value):
            try:
                self._loader.flatten_mapping(node)
            except yaml.constructor.ConstructorError as error:
                raise _Refused(node, f"{error.problem}; `<<` takes a mapping or a list of mappings") from None
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            # The key's line, not the value's: a nested mapping begins one line further down.
            self._positions[(*path, key)] = _position(key_node)
            result[key] = self._value(value_node, (*path, key))
        return result

    def _refuse_duplicates(self, node: yaml.MappingNode, path: Path) -> None:
        seen: dict[str, Position] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self._key(key_node)
            if key in seen:
                message = f"is set twice, first on line {seen[key].line}; keep one"
                self._errors.append(SourceError(_position(key_node), message, (*path, key)))
            seen.setdefault(key, _position(key_node))

    def _key(self, node: yaml.Node) -> str:
        """JSON has text keys only: numbers and booleans are spelled as kubectl spells them."""
        if not isinstance(node, yaml.ScalarNode):
            raise _Refused(node, "a key must be plain text; quote it if it begins with { or [")
        try:
            value = _json_scalar(self._loader, node)
        except ValueError as error:
            raise _Refused(node, f"{error}; write the key as plain text") from None
        if isinstance(value, bool):
            return "true" if value else "false"
        if value is None:
            raise _Refused(node, "a key is empty; write the field's name before the colon")
        return str(value) if isinstance(value, int) else str(node.value)


def _json_scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    if node.tag not in _SCALAR_TAGS:
        raise ValueError(f"the tag {_short_tag(node.tag)} has no JSON value")
    value = loader.construct_object(node)
    if isinstance(value, int | float) and ":" in node.value:
        return node.value  # YAML 1.1 reads 22:30 as a number to base 60; kubectl does not.
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{node.value} is not a JSON number")
    return value


def _short_tag(tag: str) -> str:
    return f"!!{tag[len(_TAG) :]}" if tag.startswith(_TAG) else tag


def _position(node: yaml.Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _syntax_error(error: yaml.YAMLError, text: str) -> SourceError:
    if isinstance(error, yaml.reader.ReaderError):
        head = str(text)[: error.position]
        position = Position(head.count("\n") + 1, len(head) - head.rfind("\n"))
        return SourceError(position, "a control character is not allowed in YAML; remove it")
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
    problem = str(getattr(error, "problem", None) or error)
    return SourceError(position, f"is not YAML: {problem}; {_advice(problem, text, position)}")


def _advice(problem: str, text: str, position: Position) -> str:
    """What to do about the syntax errors that people make."""
    lines = text.splitlines()
    line = lines[position.line - 1] if position.line <= len(lines) else ""
    if "\\t" in problem or line[: len(line) - len(line.lstrip())].count("\t"):
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "check the indentation, and quote a value that contains ': '"
    if "block end" in problem or "block mapping" in problem:
        return "align this line with the fields beside it"
    if "could not find expected ':'" in problem:
        return "write `field: value` and check the line above"
    if "unexpected end of stream" in problem or "flow" in problem or "',' or" in problem:
        return "close the bracket or quote"
    if "undefined alias" in problem:
        return "define it with & before it is used"
    return "check this line and the one above, and quote values with special characters"
