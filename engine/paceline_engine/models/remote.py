"""Models that are elsewhere: `hf://ORG/NAME[/FILE.gguf][@REVISION]` and `s3://BUCKET/PREFIX` or `s3://BUCKET/KEY.gguf`.

A source is fetched once into the cache and then served from there without asking again, so replicas and restarts run
what was downloaded first: name a commit, or another prefix, for other weights. This module parses, chooses files and
retries; `hub` and `s3` speak to the services, `fetching` knows which. No torch here.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from paceline_engine.models.errors import ModelError

ATTEMPTS = 5
MAX_FILES = 2000
_CHOSEN = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|chat_template\.jinja|model\.safetensors\.index\.json|[^/]+\.safetensors"
)
_HF = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+?)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")
_S3 = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<key>[^?#]+)")

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Unavailable(Exception):
    """The other side could not be reached or was too busy: trying again may help."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A parsed source. where: repository or bucket; path: a file, or the prefix of a folder; revision: of hf://."""

    scheme: Literal["hf", "s3"]
    where: str
    path: str
    revision: str
    text: str

    @property
    def is_file(self) -> bool:
        """Whether one GGUF file is named, not a folder."""
        return self.path.endswith(".gguf")


def parse(text: str) -> Remote:
    """The parts of an hf:// or s3:// source. Raises ModelError."""
    if match := _HF.fullmatch(text):
        file = match["file"] or ""
        if ".." in match["repo"] or ".." in file.split("/"):
            raise ModelError(f"model {text!r} has '..' in it: name a repository and a file in it")
        return Remote("hf", match["repo"], file, match["revision"] or "main", text)
    if match := _S3.fullmatch(text):
        return Remote("s3", match["bucket"], match["key"].strip("/"), "", text)
    if text.startswith("hf://"):
        raise ModelError(f"model {text!r} must be written hf://ORG/NAME, with /FILE.gguf or @REVISION where needed")
    raise ModelError(f"model {text!r} must be written s3://BUCKET/PREFIX or s3://BUCKET/KEY.gguf")


def choose(remote: Remote, names: list[str]) -> list[str]:
    """The files to fetch out of all there are: the one named, or what a model folder needs. Raises ModelError.

    Small files come first: they show what a model is, and a model that can't be served fails before its weights come.
    """
    if remote.is_file:
        return [remote.path]
    chosen = sorted(name for name in names if _CHOSEN.fullmatch(name))
    if "config.json" not in chosen or not any(name.endswith(".safetensors") for name in chosen):
        files = [name for name in names if name.endswith(".gguf")]
        hint = f"name one of its GGUF files, such as {files[0]}" if files else "name a Hugging Face model"
        raise ModelError(f"model {remote.text!r} has no config.json with *.safetensors beside it: {hint}")
    if len(chosen) > MAX_FILES:
        raise ModelError(f"model {remote.text!r} has {len(chosen)} files, over {MAX_FILES}: name one model's folder")
    return sorted(chosen, key=lambda name: name.endswith(".safetensors"))


def retried(what: str, attempt: Callable[[], T]) -> T:
    """`attempt` until it isn't Unavailable, ATTEMPTS times at most, 1, 2, 4, ... seconds apart. Raises ModelError."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except Unavailable as error:
            reason = " ".join(str(error).split())
            if number == ATTEMPTS:
                raise ModelError(f"{what}: {reason}: gave up after {ATTEMPTS} attempts, try again later") from error
            logger.warning("%s: %s: attempt %d of %d follows", what, reason, number + 1, ATTEMPTS)
            time.sleep(2.0 ** (number - 1))
    raise AssertionError("unreachable")


class Progress:
    """Logs a download's bytes, each further tenth once."""

    def __init__(self, text: str, total: int) -> None:
        self._text = text
        self._total = max(total, 1)
        self._done = 0
        self._logged = -1

    def add(self, num_bytes: int) -> None:
        """So many more bytes are here."""
        self._done += num_bytes
        tenth = 10 * self._done // self._total
        if tenth > self._logged:
            self._logged = tenth
            logger.info("downloading %s: %d %% of %d bytes", self._text, 100 * self._done // self._total, self._total)
