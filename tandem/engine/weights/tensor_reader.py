"""Reads tensors of safetensors files directly into their destination, with a few threads.

A tensor in host memory that keeps its stored dtype is read in place. Others pass through small staging buffers, which
are pinned for a GPU; each thread fills one of its buffers while the other is copied. So the host never holds a second
copy of the weights, and a file in the page cache is read at memory speed.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.engine.weights.safetensors_file import TensorEntry
from tandem.protocol.errors import ModelError

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights that are not quantized, by their names in safetensors."""
DTYPES = FLOATS | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""The dtypes that can be read, by their names in safetensors; dtypes of codes are never cast."""
PIECE_BYTES = 8 << 20
"""The number of bytes that one read operation reads."""
MAX_THREADS = 8
_BUFFERS = 2
_LARGEST_FLOAT16 = 65504.0
_WIDER = {torch.float64, torch.float32, torch.bfloat16}
"""The dtypes whose largest numbers exceed those of float16."""


def read_tensors(
    entries: Mapping[str, TensorEntry], into: Mapping[str, Tensor], on_read: Callable[[int], None] = lambda _: None
) -> None:
    """Copy every entry to the tensor of the same name in `into`, cast to its dtype.

    The tensors of `into` are contiguous, have the shapes of the entries, and are all on one device; the copies are
    complete on return. `on_read` is called on the caller's thread with the number of elements of each piece. Raises
    ModelError for a file that cannot be read to its end, and as `check_range` does.
    """
    devices = {into[name].device for name in entries}
    if len(devices) != 1:
        raise ValueError(f"tensors go to one device, not to {len(devices)}")
    device = devices.pop()
    staging = _Staging(device)
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(_threads(), thread_name_prefix="weights") as pool:
        files = {file: _open(file, opened) for file in {entry.file for entry in entries.values()}}
        try:
            for elements in pool.map(lambda piece: _read(piece, files[piece.file], staging), _pieces(entries, into)):
                on_read(elements)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        finally:
            pool.shutdown(cancel_futures=True)


def check_range(values: Tensor, dtype: torch.dtype, subject: str) -> None:
    """Raise ModelError if `dtype` is float16 and any value would become infinite in it.

    `subject` names the weights in the message.
    """
    if dtype != torch.float16 or values.dtype not in _WIDER or not len(values):
        return
    low, high = (float(bound) for bound in torch.aminmax(values))
    if (most := max(-low, high)) > _LARGEST_FLOAT16:
        raise ModelError(
            f"{subject} has a number of size {most:g}, and float16 holds none beyond 65504; use --dtype bfloat16 or"
            " float32."
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a tensor: its bytes start at `start` in `file`, and have the dtype `dtype`.

    `name` is the tensor's name, and `target` is the destination.
    """

    name: str
    file: Path
    start: int
    dtype: torch.dtype
    target: Tensor


class _Staging(threading.local):
    """The staging buffers of each thread and, on a GPU, its stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers: list[Tensor] = []
        if self._on_gpu:
            torch.cuda.set_device(device)
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.default_stream(device))
            self._free = [torch.cuda.Event() for _ in range(_BUFFERS)]  # type: ignore[no-untyped-call]

    def take(self, size: int) -> Tensor:
        """Return a staging buffer [size] uint8 whose last copy has ended."""
        if not self._buffers:
            count = _BUFFERS if self._on_gpu else 1
            self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(count)]
        if self._on_gpu:
            self._buffers.reverse()
            self._free.reverse()
            self._free[0].synchronize()
        return self._buffers[0][:size]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy from the buffer that `take` returned last; on a GPU, the copy is only launched."""
        if not self._on_gpu:
            target.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            if source.dtype != target.dtype:
                # Cast on the device, because casting on the host would take longer than the copy.
                source = source.to(target.device, non_blocking=True)
            target.copy_(source, non_blocking=True)
            self._free[0].record()


def _threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _open(file: Path, until: contextlib.ExitStack) -> int:
    try:
        opened = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again.") from error
    until.callback(os.close, opened)
    return opened


def _pieces(entries: Mapping[str, TensorEntry], into: Mapping[str, Tensor]) -> Iterator[_Piece]:
    """Yield the pieces of all entries in file order, so that the disk can read ahead."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].start)):
        dtype, flat = DTYPES[entry.dtype], into[name].view(-1)
        step = PIECE_BYTES // dtype.itemsize
        for first in range(0, len(flat), step):
            yield _Piece(name, entry.file, entry.start + first * dtype.itemsize, dtype, flat[first : first + step])


def _read(piece: _Piece, opened: int, staging: _Staging) -> int:
    """Read a piece into its target, and return its number of elements."""
    target = piece.target
    # Threads do not inherit inference mode, in which the weights were allocated and must be written.
    with torch.inference_mode():
        if target.device.type == "cpu" and target.dtype == piece.dtype:
            _fill(target.view(torch.uint8).numpy(), piece, opened)
        else:
            buffer = staging.take(len(target) * piece.dtype.itemsize)
            _fill(buffer.numpy(), piece, opened)
            stored = buffer.view(piece.dtype)
            check_range(stored, target.dtype, f"{piece.file}: {piece.name}")
            staging.copy(stored, target)
    return len(target)


def _fill(target: Any, piece: _Piece, opened: int) -> None:
    """Read bytes of the piece until `target`, an array of bytes, is full."""
    done, size = 0, len(target)
    try:
        while done < size:
            count = os.preadv(opened, [target[done:]], piece.start + done)
            if count == 0:
                raise ModelError(f"{piece.file} ends early; download it again.")
            done += count
    except OSError as error:
        raise ModelError(f"{piece.file} cannot be read ({error}); download it again.") from error
