"""Writes the kubeconfig through which local processes reach the local API. JSON, which is valid YAML."""

import json
import os
from pathlib import Path


def write_kubeconfig(path: Path, url: str, token: str = "", namespace: str = "default") -> None:
    """Atomically, readable by the user alone: the token is all that protects the local API.

    Without `token` the URL must carry it (`ApiServer.kubectl_url`).
    """
    name = "paceline-local"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": url}}],
        "users": [{"name": name, "user": {"token": token} if token else {}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        "current-context": name,
    }
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(document, stream, indent=2)
    draft.replace(path)
