"""Reads and writes the safetensors format without holding a whole file in memory.

A file has an 8-byte little-endian header length, the header (JSON: name → dtype, shape, byte range), then the tensors.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tandem.protocol.errors import ModelError

_LARGEST_HEADER = 8 << 20
"""Maximum size of a header in bytes: about 60,000 tensors, while a published file has a few thousand.

The reference implementation reads up to 100 million bytes, which takes many seconds.
"""
_MOST_DIMENSIONS = 8
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}

_WRITTEN = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64, "U8": np.uint8}
"""The dtypes that can be written, each with the NumPy dtype of its values; bfloat16 is passed as its bits."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry in a file's header: `dtype` as safetensors spells it, `start` the offset of the first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


def read_header(file: Path, largest: int = _LARGEST_HEADER) -> dict[str, TensorEntry]:
    """Return the entries of all tensors in a file, by name, checked against the file's size.

    Raises ModelError if the file is truncated or corrupt, or if its header has more than `largest` bytes.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{file} is truncated or no safetensors file; download it again.")
        if length > largest:
            raise ModelError(
                f"{file} has a header of {length} bytes, and the limit is {largest}; save it again in parts."
            )
        raw = stream.read(length)
    try:
        parsed = json.loads(raw)
        parsed.pop("__metadata__", None)
        entries = {name: _entry(file, 8 + length, described) for name, described in parsed.items()}
        end = max((8 + length + described["data_offsets"][1] for described in parsed.values()), default=8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{file} has a corrupt safetensors header ({error}); download it again.") from error
    if end != size:
        raise ModelError(f"{file} is truncated or corrupt: it has {size} bytes, its header speaks of {end}.")
    return entries


def _entry(file: Path, data_start: int, described: Mapping[str, object]) -> TensorEntry:
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError("an entry is malformed")
    if any(type(number) is not int or number < 0 for number in (*shape[:_MOST_DIMENSIONS], *offsets)):
        raise ValueError("an entry has a size or an offset that is no natural number")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    wanted = _ITEM_BYTES.get(dtype)
    if wanted is not None and offsets[1] - offsets[0] != wanted * math.prod(shape):
        raise ValueError("a tensor's bytes do not match its shape")
    return TensorEntry(file=file, dtype=dtype, shape=tuple(shape), start=data_start + offsets[0])


def write_float32(
    file: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[npt.NDArray[np.float32]]
) -> None:
    """Write float32 tensors, passed one at a time in the order of `shapes`, to a file."""
    write_tensors(file, {name: ("F32", shape) for name, shape in shapes.items()}, tensors)


def write_tensors(
    file: Path,
    described: Mapping[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[npt.NDArray[np.float32 | np.uint16 | np.int64 | np.uint8]],
) -> None:
    """Write tensors, passed one at a time in the order of `described` (dtype, shape), to a file.

    Their dtypes are keys of `_WRITTEN`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in described.items():
        size = _ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    # Padded so that the data is aligned for readers that map the file.
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for (dtype, shape), tensor in zip(described.values(), tensors, strict=True):
            if tensor.shape != shape or tensor.dtype != _WRITTEN[dtype]:
                raise ValueError(f"expected {dtype} {shape}, got {tensor.dtype} {tensor.shape}")
            stream.write(np.ascontiguousarray(tensor).data)
