"""Which service a model that is elsewhere is asked of. No client library is imported before something is fetched."""

from __future__ import annotations

from pathlib import Path

from paceline_engine.models.remote import Remote


def find(remote: Remote, cache_dir: Path) -> Path | None:
    """Where a fetched source lies on this machine, or None. Asks nobody."""
    if remote.scheme == "hf":
        from paceline_engine.models import hub

        return hub.find(remote, cache_dir)
    from paceline_engine.models import s3

    return s3.find(remote, cache_dir)


def fetch(remote: Remote, cache_dir: Path) -> Path:
    """Find a source or download it. Raises ModelError."""
    if (found := find(remote, cache_dir)) is not None:
        return found
    if remote.scheme == "hf":
        from paceline_engine.models import hub

        return hub.download(remote, cache_dir)
    from paceline_engine.models import s3

    return s3.download(remote, cache_dir)
