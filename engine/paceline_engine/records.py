"""Frozen records: msgspec's structs, or dataclasses that mean the same where msgspec isn't installed.

Structs where there are some: one of each kind is made for every running request in every step. Where a device's image
lacks msgspec the engine core still runs in one process; what sends records elsewhere needs msgspec. Imports neither
tensors nor I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar


class PlainStruct:
    """A base class that takes msgspec.Struct's options and makes a dataclass of each subclass.

    A frozen one can be hashed and compared, but assignment isn't refused: that would make creation three times as slow.
    tag, array_like and gc say nothing here: there's nothing to encode, and dataclasses are collected as all objects.
    """

    def __init_subclass__(
        cls, *, frozen: bool = False, kw_only: bool = False, tag: str = "", array_like: bool = False, gc: bool = True
    ) -> None:
        super().__init_subclass__()
        for name, value in list(vars(cls).items()):
            # As with msgspec, each record has an empty list or dict of its own.
            if name in cls.__annotations__ and isinstance(value, list | dict) and not value:
                setattr(cls, name, field(default_factory=type(value)))
        dataclass(kw_only=kw_only, unsafe_hash=frozen)(cls)


_Plain = TypeVar("_Plain", bound=PlainStruct)


def replace_plain(record: _Plain, /, **changes: Any) -> _Plain:
    """A copy with other values for the named fields. Raises TypeError for a field that isn't there."""
    return type(record)(**{**vars(record), **changes})


def require_msgspec(purpose: str) -> Any:
    """The msgspec package. Raises RuntimeError with one line if it isn't installed."""
    try:
        return import_module("msgspec")
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{purpose} needs the package msgspec, which isn't installed: install it") from error


if TYPE_CHECKING:
    from msgspec import Struct as Struct
    from msgspec.structs import replace as replace
else:
    try:
        from msgspec import Struct
        from msgspec.structs import replace
    except ModuleNotFoundError:
        Struct, replace = PlainStruct, replace_plain
