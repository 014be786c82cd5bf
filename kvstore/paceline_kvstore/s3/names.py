"""Names of objects: PREFIX/vVERSION/NAMESPACE/CHAIN-TOKENS-RANK, digests in hex.

The prefix is what lifecycle rules and permissions refer to, and a namespace's objects are one listing. What follows is
a hash, so the names of one namespace spread evenly over the server's partitions. Must not do I/O.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from paceline_kvstore.codec import VERSION
from paceline_kvstore.keys import ChunkKey

_NAME = re.compile(r"(?P<namespace>[0-9a-f]{64})/(?P<chain>[0-9a-f]{64})-(?P<tokens>\d{1,10})-(?P<rank>\d{1,10})")


def namespace_prefix(prefix: str, namespace: bytes | None = None) -> str:
    """What the names of one namespace's objects begin with, or those of all."""
    root = f"{prefix}/v{VERSION}/"
    return root if namespace is None else f"{root}{namespace.hex()}/"


def object_name(prefix: str, key: ChunkKey) -> str:
    """The object of a chunk, or of the pack whose first chunk it is."""
    return f"{namespace_prefix(prefix, key.namespace)}{key.chain.hex()}-{key.num_tokens}-{key.rank}"


def key_of(prefix: str, name: str) -> ChunkKey | None:
    """The key that a name was made of; None for a name that is no chunk's."""
    root = namespace_prefix(prefix)
    match = _NAME.fullmatch(name[len(root) :]) if name.startswith(root) else None
    if match is None:
        return None
    namespace, chain = bytes.fromhex(match["namespace"]), bytes.fromhex(match["chain"])
    try:
        key = ChunkKey(namespace, chain, int(match["tokens"]), int(match["rank"]))
    except ValueError:
        return None
    return key if object_name(prefix, key) == name else None


def tenant_digest(tenant: str) -> str:
    """What an object's metadata say of its owner: 32 hex digits, for metadata hold ASCII only; "" for no owner."""
    return blake2b(tenant.encode(), digest_size=16, person=b"paceline-tenant").hexdigest() if tenant else ""
