"""The namespace's internal token as the planner sees it: whether the Secret is ours and whole, and a hash of the token.

The hash is an annotation of every pod template, so that engines and routers are rolled when the Secret was deleted and
made anew: an engine reads its token once. The token is 32 random bytes, so its hash tells nothing. Pure.
"""

from __future__ import annotations

from paceline_api.kube import Manifest
from paceline_api.names import INTERNAL_TOKEN_KEY, INTERNAL_TOKEN_SECRET, MANAGED_BY
from paceline_operator.planner.manifests import ANNOTATION_INTENT, OPERATOR, dig, text_hash
from paceline_operator.planner.model import Token

ANNOTATION_TOKEN_HASH = "paceline.dev/internal-token-hash"
# Takes the place of `data` in what the operator keeps of the Secret.
TOKEN_HASH = "tokenHash"
NOT_FOUND = "InternalTokenNotFound"


def hash_of(encoded: str) -> str:
    """Of a token as it stands in a Secret, in base64; empty for none."""
    return text_hash(encoded) if encoded else ""


def without_data(secret: Manifest) -> Manifest:
    """A Secret with a hash of the token in place of everything that it holds."""
    kept = {key: value for key, value in secret.items() if key not in ("data", "stringData")}
    return {**kept, TOKEN_HASH: hash_of(str(dig(secret, "data", INTERNAL_TOKEN_KEY) or ""))}


def token_of(secret: Manifest | None) -> Token:
    """Judges what `without_data` gave."""
    name = f"Secret {INTERNAL_TOKEN_SECRET}"
    if secret is None:
        return Token(problem=(NOT_FOUND, f"there is no {name} in this namespace yet; the operator makes it"))
    ours = dig(secret, "metadata", "annotations", ANNOTATION_INTENT) is not None
    if not ours and dig(secret, "metadata", "labels", MANAGED_BY) != OPERATOR:
        return Token(problem=("NameTaken", f"{name} exists already and is not of Paceline; rename or delete it"))
    if not secret.get(TOKEN_HASH):
        message = f"{name} has no value under the key {INTERNAL_TOKEN_KEY}; delete it, and it is made anew"
        return Token(problem=("InternalTokenInvalid", message))
    return Token(hash=str(secret[TOKEN_HASH]))


def with_token_hash(template: Manifest, live: Manifest | None, token_hash: str) -> Manifest:
    """The pod template that starts its pods with this token; what runs is kept while the token is not known."""
    running = dig(live, "spec", "template", "metadata", "annotations", ANNOTATION_TOKEN_HASH)
    wanted = token_hash or running
    if not wanted:
        return template
    metadata: Manifest = template["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_TOKEN_HASH: wanted}
    return {**template, "metadata": {**metadata, "annotations": annotations}}
