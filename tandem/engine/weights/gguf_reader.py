"""Reads the metadata and tensors of a GGUF model in one file, or in several parts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderField, ReaderTensor

from tandem.protocol.errors import ModelError

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The metadata of a GGUF model, all of which is in its first part, and the tensors of all parts."""

    fields: Mapping[str, ReaderField]
    tensors: dict[str, ReaderTensor]
    """The tensors by name, whose data are mapped from the files."""

    def read(self, key: str) -> Any:
        """Return the value of a key of the metadata; None = it is missing."""
        return _value(self.fields, key)


def open_gguf(files: Sequence[Path]) -> GgufModel:
    """Read the headers of a model's files, which are in the order of their numbers.

    Raises ModelError if a file is truncated or corrupt, or if the files are not all parts of one model, according to
    the metadata that llama.cpp's loader checks, too: number of the part, number of parts, number of tensors in all.
    """
    readers = [_open_part(file) for file in files] if len(files) > 1 else [_open(files[0])]
    fields = readers[0].fields
    tensors: dict[str, ReaderTensor] = {}
    for number, (file, reader) in enumerate(zip(files, readers, strict=True)):
        wanted = {_NUMBER: number, _COUNT: len(files), _TENSORS: _value(fields, _TENSORS)}
        for key, value in wanted.items():
            found = _value(reader.fields, key)
            if found != value and (found is not None or len(files) > 1):
                raise ModelError(
                    f"{file.name} has {key} {found} instead of {value} in its metadata; put all parts of one model into"
                    " one folder, with the names that llama.cpp gave them (NAME-00001-of-00003.gguf)."
                )
        for tensor in reader.tensors:
            if tensor.name in tensors:
                raise ModelError(f"{file.name} has tensor {tensor.name}, as has a part before it; download all again.")
            tensors[tensor.name] = tensor
    if (total := _value(fields, _TENSORS)) is not None and total != len(tensors):
        raise ModelError(f"its parts have {len(tensors)} tensors, its metadata says {total}; download all again.")
    return GgufModel(fields, tensors)


def _value(fields: Mapping[str, ReaderField], key: str) -> Any:
    field = fields.get(key)
    return None if field is None else field.contents()


class _Reader(GGUFReader):  # type: ignore[misc]  # its package has no types
    """A GGUF reader that checks the file's size against its header before it reads a field or maps the tensors.

    The library itself reads past the end of a file without an error, for as long as an array's stated length.
    """

    @property
    def data(self) -> npt.NDArray[Any]:
        """The bytes of the file.

        Each slice of a plain array takes a fraction of the time of a slice of numpy's memmap, and a header has 100,000.
        """
        return self._data

    @data.setter
    def data(self, mapped: np.memmap[Any, Any]) -> None:
        self._data = mapped.view(np.ndarray)

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, **more: Any) -> npt.NDArray[Any]:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.size:
            raise ModelError(
                f"the file is truncated: it has {self.data.size} bytes, its header speaks of more; download it again."
            )
        values: npt.NDArray[Any] = super()._get(offset, dtype, count, **more)
        return values

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        needed = max((start_offs + _end(field) for field in fields), default=0)
        if self.data.size < needed:
            raise ModelError(
                f"the file is truncated: it has {self.data.size} bytes, its header speaks of {needed}; "
                "download it again."
            )
        super()._build_tensors(start_offs, fields)


def _end(field: ReaderField) -> int:
    """Return the end of a tensor, in bytes from the start of the first tensor."""
    _, _, _, dims, raw_type, offset = field.parts
    block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type[0])]
    return int(offset[0]) + int(math.prod(map(int, dims)) * type_size) // int(block_size)


def _open_part(file: Path) -> GGUFReader:
    try:
        return _open(file)
    except ModelError as error:
        raise ModelError(f"part {file.name}: {error.message}") from error


def _open(path: Path) -> GGUFReader:
    try:
        return _Reader(path)
    except ModelError:
        raise
    # The library defines no error of its own: a truncated file may cause any exception.
    except Exception as error:
        size = path.stat().st_size
        raise ModelError(
            f"the file is truncated or corrupt: its header cannot be read, it has {size} bytes; download it again."
        ) from error
