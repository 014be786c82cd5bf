"""Label and field selectors of list and watch. Pure; raises Invalid for what a real API server would refuse."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline_api.kube import Invalid, Manifest

Match = Callable[[Manifest], bool]

_SET = re.compile(r"^([\w./-]+)\s+(in|notin)\s+\(([^()]*)\)$")
_PAIR = re.compile(r"^([\w./-]+)\s*(==|=|!=)\s*([\w./-]*)$")
_NAME = re.compile(r"^(!?)\s*([\w./-]+)$")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "metadata.name": ("metadata", "name"),
    "metadata.namespace": ("metadata", "namespace"),
    "spec.nodeName": ("spec", "nodeName"),
    "status.phase": ("status", "phase"),
    "type": ("type",),
    "involvedObject.name": ("involvedObject", "name"),
    "involvedObject.uid": ("involvedObject", "uid"),
}


def matcher(label_selector: str = "", field_selector: str = "") -> Match:
    """A test for both selectors; empty selectors match everything."""
    labels = [_label_term(term) for term in _split(label_selector)]
    fields = [_field_term(term) for term in _split(field_selector)]

    def match(manifest: Manifest) -> bool:
        own = manifest["metadata"].get("labels") or {}
        return all(test(own) for test in labels) and all(test(manifest) for test in fields)

    return match


def matches_labels(selector: Mapping[str, str], labels: Mapping[str, str] | None) -> bool:
    """True if `labels` carry every pair of `selector`."""
    return all((labels or {}).get(key) == value for key, value in selector.items())


def _split(selector: str) -> list[str]:
    # Commas inside (a, b) belong to their term.
    return [term.strip() for term in re.split(r",(?![^()]*\))", selector) if term.strip()]


def _label_term(term: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.match(term):
        key, operator, values = found.group(1), found.group(2), {v.strip() for v in found.group(3).split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _PAIR.match(term):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _NAME.match(term):
        absent, key = bool(found.group(1)), found.group(2)
        return lambda labels: (key in labels) is not absent
    raise Invalid(400, "BadRequest", f"unable to parse requirement {term!r} of the label selector")


def _field_term(term: str) -> Match:
    found = _PAIR.match(term)
    path = _FIELDS.get(found.group(1)) if found else None
    if found is None or path is None:
        raise Invalid(400, "BadRequest", f"field selector {term!r} is not supported: use one of {', '.join(_FIELDS)}")
    _, operator, wanted = found.groups()

    def match(manifest: Manifest) -> bool:
        value: Any = manifest
        for name in path:
            value = (value or {}).get(name)
        return ((value or "") == wanted) is (operator != "!=")

    return match
