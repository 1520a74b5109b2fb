"""Models named by their repository on the Hugging Face Hub, downloaded into huggingface_hub's cache.

That library reads the environment: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import io
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.engine.weights.gguf_parts import part_names, require_first_part
from tandem.protocol.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub.file_download import DryRunFileInfo

_ID = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+\.gguf))?")
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_CONFIGURATION = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant*.json",
)
_OTHER_FILES = ("consolidated*", *(f"*/{pattern}" for pattern in _FILES if pattern != "*.jinja"))
"""Patterns of files that are not downloaded: other weight layouts, and subfolders with other model formats."""
_GIB = 1 << 30
_NAMED_AT_MOST = 8
Progress = Callable[[str, float], None]
"""Function that is called with a description and the completed fraction, 0 to 1."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hugging Face Hub: a whole repository, or one GGUF model in it."""

    repo: str
    revision: str | None = None
    """A branch, tag or commit; None = the default branch."""
    file: str = ""
    """The GGUF file, or the first of several; empty = the safetensors files with configuration and tokenizer."""

    @property
    def name(self) -> str:
        """The model name for clients: ORG/NAME or ORG/NAME:FILE.gguf."""
        return f"{self.repo}:{self.file}" if self.file else self.repo

    def download(self, progress: Progress) -> Path:
        """Download missing files, and return the model's folder, GGUF file or first part in the cache.

        Without a connection, or with HF_HUB_OFFLINE, the cache must have all files. Raises ModelError, which tells what
        is missing: the repository, revision or file, access to it, the connection, or disk space.
        """
        require_first_part(self.name)
        try:
            folder = self._download(progress)
        except ModelError:
            raise
        except Exception as error:  # the types of errors depend on the versions of the library and of its HTTP client
            raise self._failure(error) from error
        return folder / self.file

    def configuration(self) -> Path:
        """Return the folder in the cache with the model's configuration, which is downloaded if it is missing.

        Of a GGUF model, whose configuration is in its file, return this file or first part, which must be in the cache.
        Raises ModelError as `download` does.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        require_first_part(self.name)
        chosen: dict[str, Any] = {"repo_id": self.repo, "revision": self.revision, "allow_patterns": [*_CONFIGURATION]}
        needed = self.file or "config.json"
        with suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(**chosen, local_files_only=True))
            if (folder / needed).exists():
                return folder / self.file
        if self.file:
            raise ModelError(f"{self.name} is not in the cache; tandem models pull {self.name}")
        try:
            folder = Path(snapshot_download(**chosen, tqdm_class=_progress_bar(lambda _: None)))
        except Exception as error:  # as in `download`
            raise self._failure(error) from error
        if not (folder / needed).exists():
            raise ModelError(f"{self.repo} has no config.json; choose a repository in Hugging Face layout.")
        return folder

    def _download(self, progress: Progress) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

        parts = part_names(self.file)
        chosen: dict[str, Any] = {
            "repo_id": self.repo,
            "revision": self.revision,
            "allow_patterns": parts if self.file else list(_FILES),
            "ignore_patterns": None if self.file else list(_OTHER_FILES),
        }
        try:
            files = snapshot_download(**chosen, dry_run=True, tqdm_class=_progress_bar(lambda _: None))
        except DryRunError as unreachable:
            with suppress(LocalEntryNotFoundError):
                folder = Path(snapshot_download(**chosen, local_files_only=True))
                if all((folder / part).exists() for part in parts):
                    return folder
            raise unreachable
        self._check_files([file.filename for file in files])
        missing = _check_space(files)

        def report(done: float) -> None:
            progress(f"{done / _GIB:.2f} of {missing / _GIB:.2f} GiB", min(1.0, done / missing) if missing else 1.0)

        return Path(snapshot_download(**chosen, tqdm_class=_progress_bar(report)))

    def _check_files(self, names: Collection[str]) -> None:
        """Raise ModelError, which lists the repository's GGUF files, if the repository lacks the model's weights."""
        if any(name.endswith((".safetensors", ".gguf")) for name in names):
            if self.file and (missing := [name for name in part_names(self.file) if name not in names]):
                raise ModelError(f"{self.repo} lacks {missing[0]}, a part of this model; choose another one.")
            return
        from huggingface_hub import list_repo_files

        files = list_repo_files(self.repo, revision=self.revision)
        gguf_files = [name for name in files if name.endswith(".gguf") and name == part_names(name)[0]]
        lacks = f"no file {self.file}" if self.file else "no safetensors"
        if not gguf_files:
            raise ModelError(f"{self.repo} has {lacks} and no GGUF file; choose a repository that has them.")
        ids = ", ".join(f"{self.repo}:{name}" for name in gguf_files[:_NAMED_AT_MOST])
        more = ", …" if len(gguf_files) > _NAMED_AT_MOST else "."
        raise ModelError(f"{self.repo} has {lacks}; give one of its GGUF files: {ids}{more}")

    def _failure(self, error: Exception) -> ModelError:
        """Return the error of a download that failed with `error`, with the cause and the remedy."""
        from huggingface_hub import constants, errors

        hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
        if isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError) and error.__cause__ is not None:
            error = cast("Exception", error.__cause__)
        detail = " ".join(str(error).split()) or type(error).__name__
        match error:
            case errors.GatedRepoError():
                reason = (
                    f"the repository is gated; accept its conditions at {hub}/{self.repo} and set HF_TOKEN to a token"
                    " of the account that did."
                )
            case errors.RepositoryNotFoundError():
                reason = (
                    f"this is neither a folder or file here nor a public repository of {hub}; correct the name, or set"
                    " HF_TOKEN if it is private."
                )
            case errors.RevisionNotFoundError():
                reason = f"the repository has no revision {self.revision}; give one of its branches, tags or commits."
            case errors.OfflineModeIsEnabled():
                reason = (
                    f"HF_HUB_OFFLINE is set, and the cache {cache} lacks files of it; unset the variable to download"
                    " them."
                )
            case errors.HfHubHTTPError(response=response) if response.status_code == 401:
                reason = (
                    f"{hub} does not accept the token; correct HF_TOKEN or the token that `hf auth login` saved, or"
                    " remove it if the repository is public."
                )
            case errors.HfHubHTTPError(response=response) if response.status_code == 403:
                reason = (
                    f"{hub} forbids the download ({detail}); set HF_TOKEN to a token that may read this repository."
                )
            case errors.HfHubHTTPError(response=response) if response.status_code == 429:
                reason = (
                    f"{hub} limits the rate of requests ({detail}); try again later, or set HF_TOKEN for a higher"
                    " limit."
                )
            case OSError(errno=errno.ENOSPC):
                reason = f"the disk of {cache} is full; free some space, or set HF_HOME to another disk."
            case _:
                reason = (
                    f"it cannot be downloaded from {hub} ({detail}), and the cache {cache} lacks files of it; check the"
                    " connection and HF_ENDPOINT."
                )
        return ModelError(f"{self.name}: {reason}")


def hub_model(model: Path) -> HubModel | None:
    """Parse ORG/NAME[@REVISION][:FILE.gguf].

    Returns None if `model` has another form, or is an existing folder or file, which takes precedence.
    """
    match = _ID.fullmatch(str(model))
    if match is None or model.exists() or match["repo"].endswith(".gguf"):
        return None
    return HubModel(match["repo"], match["revision"], match["file"] or "")


def _check_space(files: Iterable[DryRunFileInfo]) -> int:
    """Return the bytes that must be downloaded. Raises ModelError if the cache's disk has less free space."""
    from huggingface_hub import constants

    missing = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if missing > free:
        raise ModelError(
            f"{missing / _GIB:.2f} GiB are to be downloaded, and the disk of {cache} has {free / _GIB:.2f} GiB left; "
            "free some space, or set HF_HOME to another disk."
        )
    return missing


def _progress_bar(report: Callable[[float], None]) -> Any:
    """Return a progress bar class for huggingface_hub that passes the bytes so far to `report` and prints nothing."""
    from tqdm import tqdm

    class ProgressBar(tqdm):  # type: ignore[misc]  # its package has no types
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **{**given, "file": io.StringIO(), "disable": False})

        def display(self, *_args: Any, **_given: Any) -> None:
            # The library has one bar that counts files and may have two that count bytes, of which one may stay at 0.
            if self.unit == "B" and self.n:
                report(self.n)

    return ProgressBar
