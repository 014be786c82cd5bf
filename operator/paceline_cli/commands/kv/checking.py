"""`paceline kv verify` and `gc`: read and check every chunk; remove those that nobody needs."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_cli.commands.kv.contents import namespaces_like
from paceline_cli.commands.kv.place import UNBOUNDED, Place, size_of
from paceline_cli.commands.kv.report import human, progress, say
from paceline_cli.errors import EXIT_DONE, EXIT_FAILED, BadInput
from paceline_kvstore.tiers.disk import CAPACITY_MIN
from paceline_kvstore.tiers.s3 import S3Tier


@dataclass(frozen=True, slots=True)
class GcOptions:
    """What goes: these namespaces, all but the kept ones, a tenant's chunks, whatever is over `capacity`."""

    namespaces: list[str]
    keep: list[str]
    tenant: str | None
    capacity: str | None


def verify(place: Place, *, as_json: bool) -> int:
    """Read every chunk; EXIT_FAILED if one is bad."""
    with place.open() as tier:
        keys = list(tier.keys())
        good = num_bytes = 0
        for key in progress(keys, "reading", len(keys)):
            payload = tier.get(key)
            if payload is not None:
                good += 1
                num_bytes += payload.nbytes
        bad = tier.quarantine.total
        latest = [f"{refusal.place}: {refusal.message}" for refusal in tier.quarantine.latest()]
    facts = {"place": place.where, "chunks": len(keys), "good": good, "bad": bad, "bytes": num_bytes, "latest": latest}
    lines = [f"{place.where}: {good} of {len(keys)} chunks are good ({human(num_bytes)}), {bad} bad"]
    lines += [f"  {line}" for line in latest]
    say(facts, lines, as_json=as_json)
    return EXIT_FAILED if bad else EXIT_DONE


def gc(place: Place, options: GcOptions, *, as_json: bool) -> int:
    """Remove what the options name, and in S3 the uploads whose writers died a day ago."""
    if options.capacity is not None and (place.is_s3 or place.is_node):
        raise BadInput("--capacity is for folders; lifecycle rules bound a bucket, and --memory a node server")
    named = options.namespaces or options.keep or options.tenant is not None or options.capacity is not None
    if not named and not place.is_s3:
        raise BadInput("nothing to remove is named: give --namespace, --keep, --tenant or --capacity")
    capacity = UNBOUNDED if options.capacity is None else size_of("--capacity", options.capacity, CAPACITY_MIN)
    with place.open() as tier:
        before, used = len(list(tier.keys())), tier.bytes_used
        doomed = namespaces_like(tier, options.namespaces)
        if options.keep:
            kept = namespaces_like(tier, options.keep)
            doomed |= {key.namespace for key in tier.keys()} - kept  # noqa: SIM118
        if options.tenant is not None:
            tier.clear(tenant=options.tenant)
        for namespace in progress(sorted(doomed), "removing", len(doomed)):
            tier.clear(namespace=namespace)
        tier.flush()
        uploads = tier.sweep() if isinstance(tier, S3Tier) else 0
        after = len(list(tier.keys()))
    if options.capacity is not None:
        # A tier makes itself as small as it is told to be when it opens.
        with place.open(capacity) as tier:
            after = len(list(tier.keys()))
    facts = {"place": place.where, "removed": before - after, "left": after, "uploads": uploads}
    lines = [f"{place.where}: {before - after} chunks removed, {after} left"]
    if options.capacity is not None:
        # What is kept for the next writes while the folder is open goes when it is closed.
        left = sum(path.stat().st_size for path in place.folder().glob("*.kv"))
        facts["bytes"] = left
        lines[0] += f", {human(used)} of files before, {human(left)} now"
    if place.is_s3:
        lines.append(f"  {uploads} unfinished uploads aborted")
    say(facts, lines, as_json=as_json)
    return EXIT_DONE
