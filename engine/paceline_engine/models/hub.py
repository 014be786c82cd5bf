"""Models from the Hugging Face Hub, through its own client, into its own folder layout.

A revision is resolved to a commit once; every file is fetched at that commit, and its size and, for large files, its
SHA-256 must be what the Hub says. A snapshot that the user's own cache ($HF_HUB_CACHE, $HF_HOME) has complete is used
where it is; downloads go into the engine's cache, which is bounded. $HF_ENDPOINT and $HF_TOKEN are honoured, and with
$HF_HUB_OFFLINE nothing is asked. No torch here.
"""

from __future__ import annotations

import os
import re
from hashlib import file_digest
from pathlib import Path
from typing import Any

from paceline_engine.models import cache, hf_folder
from paceline_engine.models.errors import ModelError
from paceline_engine.models.remote import Progress, Remote, Unavailable, choose, retried

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_SECONDS = 20.0


def find(remote: Remote, cache_dir: Path) -> Path | None:
    """A complete snapshot of the revision: the user's, else ours."""
    for root in (_user_cache(), cache_dir / "hub"):
        repository = root / _folder_name(remote)
        try:
            # Ours gets its ref when all files are there.
            commit = (repository / "refs" / remote.revision).read_text("utf-8").strip()
        except OSError:
            commit = remote.revision
        path = repository / "snapshots" / commit / remote.path
        if _COMMIT.fullmatch(commit) and _is_complete(path, remote):
            return path
    return None


def download(remote: Remote, cache_dir: Path) -> Path:
    """Fetch the revision's files; the snapshot's path. Raises ModelError."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ModelError(f"model {remote.text!r} is not in the cache, and HF_HUB_OFFLINE is set: fetch it first")
    root = cache_dir / "hub"
    repository = root / _folder_name(remote)
    cache.hold(repository)
    with cache.locked(root / f"{repository.name}.lock"):
        if (found := find(remote, cache_dir)) is not None:
            return found
        hub = _Hub(remote, root)
        commit = hub.fetch_all()
        # Last, so that a ref without all its files is never seen.
        for name in {remote.revision, commit}:
            ref = repository / "refs" / name
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit, "utf-8")
    return repository / "snapshots" / commit / remote.path


class _Hub:
    """One repository on the Hub."""

    def __init__(self, remote: Remote, root: Path) -> None:
        # Read when the client is imported; its default lies in a home folder that a container may not have.
        os.environ.setdefault("HF_XET_CACHE", str(root / "xet"))
        try:
            import huggingface_hub
            from huggingface_hub import errors, utils
        except ImportError as error:
            raise ModelError(
                f"model {remote.text!r} needs the package huggingface-hub: pip install 'paceline[sources]'"
            ) from error
        utils.disable_progress_bars()
        self._hub: Any = huggingface_hub
        self._errors: Any = errors
        self._remote = remote
        self._root = root
        self._options: dict[str, Any] = {
            "endpoint": os.environ.get("HF_ENDPOINT") or None,
            "token": os.environ.get("HF_TOKEN") or None,
        }

    def fetch_all(self) -> str:
        """Fetch and check every file that is needed; the commit."""
        what = f"can't fetch model {self._remote.text!r}"
        info = retried(what, lambda: self._ask(self._info))
        expected = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        names = choose(self._remote, list(expected))
        if missing := [name for name in names if name not in expected]:
            raise ModelError(f"model {self._remote.text!r}: the repository has no file {missing[0]!r}: check its name")
        progress = Progress(f"{self._remote.text} at {info.sha}", sum(expected[name].size or 0 for name in names))
        for name in names:
            retried(what, lambda name=name: self._fetch(name, info.sha, expected[name]))
            progress.add(expected[name].size or 0)
        return str(info.sha)

    def _info(self) -> Any:
        api = self._hub.HfApi(**self._options)
        return api.model_info(
            self._remote.where, revision=self._remote.revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )

    def _fetch(self, name: str, commit: str, expected: Any) -> None:
        path = Path(self._ask(lambda: self._download(name, commit)))
        size, sha256 = path.stat().st_size, expected.lfs.sha256 if expected.lfs else None
        if expected.size is not None and size != expected.size:
            problem = f"{name} came with {size} bytes, not {expected.size}"
        elif sha256 is not None and _sha256(path) != sha256:
            problem = f"{name} came with another SHA-256 than the Hub says"
        else:
            return
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise Unavailable(problem)

    def _download(self, name: str, commit: str) -> str:
        return self._hub.hf_hub_download(
            self._remote.where,
            name,
            revision=commit,
            cache_dir=self._root,
            etag_timeout=_TIMEOUT_SECONDS,
            library_name="paceline",
            **self._options,
        )

    def _ask(self, call: Any) -> Any:
        """The client's answer; its many errors become Unavailable, or one line that says what to do."""
        errors, text = self._errors, self._remote.text
        try:
            return call()
        except errors.GatedRepoError as error:
            raise ModelError(f"model {text!r} is gated: accept its terms and set HF_TOKEN") from error
        except errors.RepositoryNotFoundError as error:
            raise ModelError(f"model {text!r}: no such repository, or it is private: check it, set HF_TOKEN") from error
        except errors.RevisionNotFoundError as error:
            raise ModelError(f"model {text!r}: no revision {self._remote.revision!r}: check it") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status == 429 or status >= 500:
                raise Unavailable(f"the Hub answered {status}") from error
            raise ModelError(f"model {text!r}: the Hub answered {status}: check the name and HF_TOKEN") from error
        except errors.HFValidationError as error:
            raise ModelError(f"model {text!r}: {' '.join(str(error).split())}") from error
        except OSError as error:
            if error.errno is not None and not isinstance(error, ConnectionError):
                raise  # A full disk, or a folder that can't be written: said by the caller.
            raise Unavailable(f"the Hub can't be reached ({error})") from error
        except Exception as error:
            # The client's HTTP library is its own affair: a broken connection comes as one of its many errors.
            if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
                raise
            raise Unavailable(f"the Hub can't be reached ({type(error).__name__}: {error})") from error


def _user_cache() -> Path:
    """Where the Hub's client keeps snapshots: $HF_HUB_CACHE, or hub in $HF_HOME, or in the user's cache folder."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]) / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/"), ".cache")
    return Path(base) / "huggingface" / "hub"


def _folder_name(remote: Remote) -> str:
    return "models--" + remote.where.replace("/", "--")


def _is_complete(path: Path, remote: Remote) -> bool:
    """Whether a snapshot has all that serving needs; another program may have fetched a part."""
    if remote.is_file:
        return path.is_file()
    try:
        hf_folder.weight_files(path)
    except ModelError:
        return False
    return (path / "config.json").is_file() and (path / "tokenizer.json").is_file()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
