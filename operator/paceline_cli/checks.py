"""Finds what is wrong with loaded objects: each by itself, and equal names among them. Pure.

Objects of this API group are judged by the models behind the CRDs, and by the planner's own checks of what no schema
can say. Objects of other groups (Secrets, ConfigMaps, ...) must only be addressable: their schemas are not ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from paceline_api.v1alpha1 import InferenceService, KVStore, Resource
from paceline_api.validation import InvalidObject, is_ours, parse
from paceline_cli.inputs import Finding, SourceObject


def check_objects(objects: Iterable[SourceObject]) -> tuple[list[tuple[SourceObject, Resource]], list[Finding]]:
    """The typed objects of this API that are valid, and every problem of all objects in the order of the files."""
    typed: list[tuple[SourceObject, Resource]] = []
    problems: list[Finding] = []
    seen: dict[tuple[str, str, str, str], SourceObject] = {}
    for item in objects:
        resource: Resource | None = None
        if is_ours(item.manifest):
            resource, found = _read(item)
        else:
            found = list(_addressing_problems(item))
        if not found:
            found = list(_duplicate(item, seen))
        if resource is not None and not found:
            typed.append((item, resource))
        problems += found
    return typed, problems


def _read(item: SourceObject) -> tuple[Resource | None, list[Finding]]:
    try:
        resource = parse(item.manifest)
    except InvalidObject as error:
        return None, [item.finding(p.path, p.message) for p in error.problems]
    return resource, list(_planner_problems(item, resource))


def _addressing_problems(item: SourceObject) -> Iterator[Finding]:
    for key in ("apiVersion", "kind"):
        value = item.manifest.get(key)
        if value is None:
            yield item.finding((key,), "is required")
        elif not isinstance(value, str) or not value:
            yield item.finding((key,), f"must be text, not {value!r}; quote it")
    metadata = item.manifest.get("metadata")
    if not isinstance(metadata, dict):
        yield item.finding(("metadata",), "is required" if metadata is None else "must have fields, such as name")
        return
    name = cast("dict[str, object]", metadata).get("name")
    if name is None:
        yield item.finding(("metadata", "name"), "is required")
    elif not isinstance(name, str) or not name:
        yield item.finding(("metadata", "name"), f"must be text, not {name!r}; quote it")


def _planner_problems(item: SourceObject, resource: Resource) -> Iterator[Finding]:
    problem = None
    if isinstance(resource, InferenceService):
        from paceline_operator.planner.spec_problem import spec_problem  # not needed for other kinds

        found = spec_problem(resource)
        problem = None if found is None else found[1]
    elif isinstance(resource, KVStore):
        from paceline_operator.planner.kv_settings import store_problem

        problem = store_problem(resource)
    if problem is not None:
        # "spec.engine.extraArgs[2]: why"
        where, _, why = problem.partition(": ")
        yield item.finding(_path_of(where), why)


def _path_of(field: str) -> tuple[int | str, ...]:
    words = field.replace("[", ".").replace("]", "").split(".")
    return tuple(int(word) if word.isdigit() else word for word in words)


def _duplicate(item: SourceObject, seen: dict[tuple[str, str, str, str], SourceObject]) -> Iterator[Finding]:
    group = str(item.manifest["apiVersion"]).rpartition("/")[0]
    first = seen.setdefault((group, item.kind, item.namespace, item.name), item)
    if first is not item:
        yield item.finding(
            ("metadata", "name"), f"{item.label} is defined twice, first at {first.place}; remove one or rename it"
        )
