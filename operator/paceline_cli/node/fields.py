"""Strict reading of a manifest: every key is read by somebody or refused with its path.

Why: a node that ignores a field it does not know makes a test pass that a real cluster fails. No I/O.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline_cli.node.pod import PodRefused

_NOTHING: tuple[Any, ...] = (None, {}, [])


class Fields:
    """One mapping of a manifest at `path`. Read keys with the methods below, then call `done()`.

    null, {} and [] count as absent: they ask for nothing.
    """

    def __init__(self, data: Any, path: str) -> None:
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            raise PodRefused(path, "must be a mapping")
        self._data = data
        self._unread = {k for k, v in data.items() if v not in _NOTHING}
        self.path = path

    def has(self, key: str) -> bool:
        """True if the key asks for something; does not mark it as read."""
        return self._data.get(key) not in _NOTHING

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it is; marks the key as read."""
        self._unread.discard(key)
        value = self._data.get(key)
        return default if value is None else value

    def _typed(self, key: str, kind: type, default: Any, word: str) -> Any:
        value = self.raw(key, default)
        # bool is an int in Python but not in a manifest.
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise PodRefused(f"{self.path}.{key}", f"must be {word}")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        return self._typed(key, str, default, "a string")

    def integer(self, key: str, default: int) -> int:
        """An integer."""
        return self._typed(key, int, default, "an integer")

    def integer_or_none(self, key: str) -> int | None:
        """An integer or None."""
        return self._typed(key, int, None, "an integer")

    def flag_or_none(self, key: str) -> bool | None:
        """A boolean or None."""
        return self._typed(key, bool, None, "true or false")

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        return self._typed(key, bool, default, "true or false")

    def port(self, key: str) -> int | str:
        """A port number or a port's name."""
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise PodRefused(f"{self.path}.{key}", "must be a port number or the name of a port")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._typed(key, list, [], "a list")
        if not all(isinstance(item, str) for item in value):
            raise PodRefused(f"{self.path}.{key}", "must be a list of strings")
        return tuple(value)

    def texts(self, key: str) -> dict[str, str]:
        """A mapping whose values are made strings (quantities may be numbers in YAML)."""
        value = self._typed(key, dict, {}, "a mapping")
        return {str(k): str(v) for k, v in value.items()}

    def child(self, key: str) -> "Fields":
        """A nested mapping; empty if absent."""
        return Fields(self.raw(key), f"{self.path}.{key}")

    def children(self, key: str) -> Iterator["Fields"]:
        """The mappings of a list."""
        for index, item in enumerate(self._typed(key, list, [], "a list")):
            yield Fields(item, f"{self.path}.{key}[{index}]")

    def accept(self, *keys: str) -> None:
        """Keys that are another component's business (scheduler, admission, image pull)."""
        self._unread.difference_update(keys)

    def only(self, key: str, *allowed: Any, default: Any = None, why: str = "") -> None:
        """Refuses any value of `key` but those in `allowed`; absent counts as `default`, or is fine without one."""
        value = self.raw(key, default)
        if value is not None and value not in allowed:
            words = " or ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
            raise PodRefused(f"{self.path}.{key}", f"only {words} is honoured by a process node{why and ': ' + why}")

    def done(self) -> None:
        """Raises PodRefused for a key that was not read."""
        for key in sorted(self._unread):
            raise PodRefused(f"{self.path}.{key}", "not honoured by a process node; remove the field")
