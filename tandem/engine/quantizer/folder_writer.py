"""Writes a model folder one tensor at a time; the folder appears only when it is complete."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tandem.protocol.errors import InvalidArgument

_SHARD_BYTES = 2 << 30
"""The total size in bytes of the tensors that are collected before they are written as one file."""


class FolderWriter:
    """A context manager that writes the folder `folder`.

    The folder exists after success, and nothing is left after an error.
    """

    def __init__(self, folder: Path) -> None:
        """Create a temporary folder.

        Raises InvalidArgument if `folder` exists, because nothing is overwritten, or if it cannot be written.
        """
        if folder.exists():
            raise InvalidArgument("output", f"{folder} exists; name a folder that does not.")
        self._folder = folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        except OSError as error:
            raise InvalidArgument("output", f"{folder} cannot be written: {error}.") from error
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = 0

    @property
    def total_bytes(self) -> int:
        """The size in bytes of all tensors added so far."""
        return self._bytes + sum(tensor.nbytes for tensor in self._held.values())

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors from any device. Raises InvalidArgument if they cannot be written."""
        self._held |= {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in self._held.values()) >= _SHARD_BYTES:
            self._write_shard()

    def finish(self, config: Mapping[str, Any], source: Path, side_files: Sequence[Path]) -> None:
        """Write the last tensors, their index, config.json, and copies of `side_files`.

        `side_files` are relative to the folder `source`. Raises InvalidArgument if writing fails.
        """
        if self._held:
            self._write_shard()
        with self._writing():
            self._write_rest(config, source, side_files)

    def _write_rest(self, config: Mapping[str, Any], source: Path, side_files: Sequence[Path]) -> None:
        count = len(self._shards)
        named: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            final = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self._partial / f"{number}.safetensors").rename(self._partial / final)
            named |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": named}
            _write_json(self._partial / "model.safetensors.index.json", index)
        _write_json(self._partial / "config.json", config)
        for file in side_files:
            (self._partial / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / file, self._partial / file)

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with self._writing():
                    self._partial.chmod(0o755)
                    self._partial.rename(self._folder)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert errors of the file system, such as a full disk, into InvalidArgument."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise InvalidArgument("output", f"{self._folder} cannot be written: {error}.") from error

    def _write_shard(self) -> None:
        with self._writing():
            save_file(self._held, self._partial / f"{len(self._shards) + 1}.safetensors", metadata={"format": "pt"})
        self._bytes = self.total_bytes
        self._shards.append(list(self._held))
        self._held = {}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
