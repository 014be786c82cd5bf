"""`paceline kv stats` and `ls`: what is stored in a place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

from paceline_cli.commands.kv.place import Place, Stored
from paceline_cli.commands.kv.report import human, progress, say
from paceline_cli.errors import EXIT_DONE, BadInput
from paceline_kvstore.keys import ChunkKey
from paceline_kvstore.tiers.s3 import S3Tier


@dataclass(slots=True)
class NamespaceCount:
    """The chunks of one namespace: one model, weights, layout."""

    namespace: str
    chunks: int = 0
    tokens: int = 0


def stats(place: Place, *, as_json: bool) -> int:
    """Chunks, tokens and bytes, by namespace."""
    with place.open() as tier:
        counts: dict[bytes, NamespaceCount] = {}
        num_bytes = 0 if isinstance(tier, S3Tier) else tier.bytes_used
        for keys, size in progress(_groups(tier), "listing"):
            num_bytes += size
            for key in keys:
                count = counts.setdefault(key.namespace, NamespaceCount(key.namespace.hex()))
                count.chunks += 1
                count.tokens += key.num_tokens
        found = sorted(counts.values(), key=lambda count: -count.chunks)
        facts = {
            "place": place.where,
            "chunks": sum(count.chunks for count in found),
            "tokens": sum(count.tokens for count in found),
            "bytes": num_bytes,
            "corrupt": tier.quarantine.total,
            "namespaces": [asdict(count) for count in found],
        }
    lines = [f"{place.where}: {facts['chunks']} chunks, {facts['tokens']} tokens, {human(num_bytes)}"]
    lines += [f"  {count.namespace[:16]}  {count.chunks} chunks, {count.tokens} tokens" for count in found]
    if facts["corrupt"]:
        lines.append(f"  {facts['corrupt']} bad chunks were found and dropped")
    say(facts, lines, as_json=as_json)
    return EXIT_DONE


def ls(place: Place, namespace: str, limit: int | None, *, as_json: bool) -> int:
    """One line for each chunk."""
    if not set(namespace.lower()) <= set("0123456789abcdef"):
        raise BadInput(f"--namespace {namespace}: it is hex digits; `paceline kv stats` lists namespaces")
    shown = 0
    with place.open() as tier:
        for key in islice(_chosen(tier, namespace), limit):
            sys.stdout.write(json.dumps(_facts(key)) + "\n" if as_json else f"{key}\n")
            shown += 1
    if namespace and not shown:
        raise _no_such(namespace)
    return EXIT_DONE


def namespaces_like(tier: Stored, prefixes: list[str]) -> set[bytes]:
    """The namespaces there that begin with each of these hex digits. BadInput if one of them begins none."""
    there = {key.namespace for key in tier.keys()}  # noqa: SIM118
    chosen: set[bytes] = set()
    for prefix in prefixes:
        found = {namespace for namespace in there if namespace.hex().startswith(prefix.lower())}
        if not found:
            raise _no_such(prefix)
        chosen |= found
    return chosen


def _no_such(prefix: str) -> BadInput:
    return BadInput(f"there is no namespace that begins with {prefix}; `paceline kv stats` lists them")


def _chosen(tier: Stored, namespace: str) -> Iterator[ChunkKey]:
    return (key for key in tier.keys() if key.namespace.hex().startswith(namespace.lower()))  # noqa: SIM118


def _groups(tier: Stored) -> Iterator[tuple[tuple[ChunkKey, ...], int]]:
    """Keys with the bytes that they take beyond those that the tier counts itself."""
    if isinstance(tier, S3Tier):
        for found in tier.objects():
            yield found.keys, found.size
    else:
        for key in tier.keys():  # noqa: SIM118
            yield (key,), 0


def _facts(key: ChunkKey) -> dict[str, object]:
    return {
        "namespace": key.namespace.hex(),
        "chain": key.chain.hex(),
        "tokens": key.num_tokens,
        "rank": key.rank,
    }
