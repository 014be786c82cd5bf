"""Server-side apply on plain dicts: field ownership per manager, complete intent, forced conflicts. Pure.

Semantics (Kubernetes, "Server-Side Apply"): a manager owns the leaves it applied; what it no longer applies is removed
unless another manager owns it; a forced apply of a different value takes the field from its owners, the same value is
shared. Lists are atomic except the list-maps named below, whose items are merged by key; mappings are
merged except those named below.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

Path = tuple[Any, ...]
"""Field names (str) and, for an item of a list-map, its key as a tuple of (field, value) pairs."""
Owners = Mapping[str, frozenset[Path]]
"""Paths by manager."""

_LIST_KEYS: Mapping[str, tuple[str, ...]] = {
    "conditions": ("type",),
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_ATOMIC = frozenset({"selector", "labelSelector", "nodeSelector", "roleRef"})
"""Mappings that are replaced as a whole."""
_MEMBER = object()
"""Value of the path of a list-map's item: the item is there, whatever it holds."""


def _keys_of(path: Path, items: list[Any]) -> tuple[str, ...] | None:
    """Key fields of the list at `path`; None = atomic."""
    name = path[-1] if path else None
    if not items or not isinstance(name, str) or not all(isinstance(item, dict) for item in items):
        return None
    keys = _LIST_KEYS.get(name)
    # Top-level `ports` is an EndpointSlice's, which is atomic.
    if name == "ports" and len(path) > 1:
        keys = ("containerPort", "protocol") if "containerPort" in items[0] else ("port", "protocol")
    if keys is None or not all(item.get(k) is not None for item in items for k in keys if k != "protocol"):
        return None
    return keys


def _key(item: Mapping[str, Any], keys: tuple[str, ...]) -> Path:
    return tuple((k, item.get(k, "TCP" if k == "protocol" else None)) for k in keys)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf of a manifest with its path; empty and atomic mappings and atomic lists are leaves."""
    if isinstance(value, dict) and value and not (path and path[-1] in _ATOMIC):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list) and (keys := _keys_of(path, value)):
        for item in value:
            here = (*path, _key(item, keys))
            yield here, _MEMBER
            yield from leaves(item, here)
    else:
        yield path, value


def without_nulls(value: Any) -> Any:
    """A copy without keys whose value is null: typed API objects cannot hold them."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def apply(live: dict[str, Any], owners: Owners, manager: str, intent: dict[str, Any]) -> tuple[dict[str, Any], Owners]:
    """(object, owners) after `manager` applied `intent` by force. Arguments are not changed."""
    wanted = dict(leaves(intent))
    before = dict(leaves(live))
    taken = {path for path, value in wanted.items() if path in before and before[path] != value}
    result = _merge(deepcopy(live), intent, ())
    others = {name: paths - taken for name, paths in owners.items() if name != manager}
    owned_by_others = frozenset[Path]().union(*others.values())
    dropped = owners.get(manager, frozenset()) - wanted.keys() - owned_by_others
    # Items of lists before their fields: without its key field an item could not be found.
    for path in sorted(dropped, key=len):
        if before.get(path) is _MEMBER and any(p[: len(path)] == path for p in owned_by_others):
            continue
        _remove(result, path, wanted)
    kept = {name: paths for name, paths in others.items() if paths}
    return result, kept | {manager: frozenset(wanted)}


def conflicts(live: dict[str, Any], owners: Owners, manager: str, intent: dict[str, Any]) -> list[tuple[str, str]]:
    """(other manager, field) for each field that an unforced apply by `manager` would take from another."""
    before = dict(leaves(live))
    taken = {path for path, value in leaves(intent) if path in before and before[path] != value}
    return sorted((name, _shown(path)) for name, paths in owners.items() if name != manager for path in paths & taken)


def _shown(path: Path) -> str:
    text = ""
    for part in path:
        text += f".{part}" if isinstance(part, str) else "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in part) + "]"
    return text


def changed_by_update(owners: Owners, manager: str, old: Any, new: Any) -> Owners:
    """Owners after a PUT or PATCH by `manager`: what changed is its own, nobody else's."""
    before, after = dict(leaves(old)), dict(leaves(new))
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    result = {name: paths - changed for name, paths in owners.items()}
    result[manager] = result.get(manager, frozenset()) | (changed & after.keys())
    return {name: paths for name, paths in result.items() if paths}


def _merge(live: Any, intent: Any, path: Path) -> Any:
    if path and path[-1] in _ATOMIC:
        return deepcopy(intent)
    if isinstance(intent, dict) and isinstance(live, dict):
        for name, value in intent.items():
            live[name] = _merge(live[name], value, (*path, name)) if name in live else deepcopy(value)
        return live
    if isinstance(intent, list) and isinstance(live, list):
        keys = _keys_of(path, intent)
        if keys and keys == _keys_of(path, live):
            return _merge_list(live, intent, keys, path)
    return deepcopy(intent)


def _merge_list(live: list[Any], intent: list[Any], keys: tuple[str, ...], path: Path) -> list[Any]:
    present = {_key(item, keys): item for item in live}
    merged = {
        key: _merge(present[key], item, (*path, key)) if key in present else deepcopy(item)
        for item in intent
        for key in [_key(item, keys)]
    }
    # Two managers of one list must not reorder each other's items for ever: order changes only if ours is wrong.
    ours = [key for key in present if key in merged]
    added = [key for key in merged if key not in present]
    if ours + added == list(merged):
        return [*(merged.get(key, item) for key, item in present.items()), *(merged[key] for key in added)]
    return [*merged.values(), *(item for key, item in present.items() if key not in merged)]


def _remove(root: Any, path: Path, wanted: Mapping[Path, Any]) -> None:
    """Takes the leaf or item at `path` out, and parents that became empty unless somebody asked for them."""
    chain = [root]
    for element in path[:-1]:
        chain.append(_step(chain[-1], element))
        if chain[-1] is None:
            return
    for depth in range(len(path) - 1, -1, -1):
        parent, element = chain[depth], path[depth]
        if isinstance(parent, list):
            parent[:] = [item for item in parent if not _matches(item, element)]
        elif isinstance(parent, dict):
            parent.pop(element, None)
        if parent or path[:depth] in wanted:
            return


def _step(value: Any, element: Any) -> Any:
    if isinstance(element, str):
        return value.get(element) if isinstance(value, dict) else None
    if isinstance(value, list):
        return next((item for item in value if _matches(item, element)), None)
    return None


def _matches(item: Any, key: Path) -> bool:
    return isinstance(item, dict) and _key(item, tuple(name for name, _ in key)) == key
