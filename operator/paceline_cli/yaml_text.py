"""Writes manifests as YAML the way people write them: block style, fields in the order given, no anchors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from paceline_api.kube import Manifest


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump_documents(documents: Iterable[tuple[str, Manifest]]) -> str:
    """Multi-document text; each document comes with a comment of one line."""
    return "".join(f"---\n# {comment}\n{dump(manifest)}" for comment, manifest in documents)


def dump(manifest: Manifest) -> str:
    """One document."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
