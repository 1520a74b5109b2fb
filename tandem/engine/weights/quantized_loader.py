"""Loads quantized weights: a few at a time are read to the device, repacked there, and copied to their slots."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import EllipsisType

import torch
from torch import Tensor

from tandem.engine.config.quantization import WeightFormat, WeightScheme
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tandem.engine.models.allocation import packing_of
from tandem.engine.models.slots import ParameterSlot
from tandem.engine.weights.quantized import FORMATS
from tandem.engine.weights.quantized.format import GroupedCodes, StoredTensor
from tandem.engine.weights.quantized.rounding import rounded
from tandem.engine.weights.safetensors_file import TensorEntry
from tandem.engine.weights.tensor_reader import DTYPES, FLOATS, MAX_THREADS, PIECE_BYTES, check_range, read_tensors
from tandem.protocol.errors import ModelError

_BATCH_BYTES = MAX_THREADS * PIECE_BYTES
"""The number of bytes in a batch, one piece per thread; only these are in memory as stored and repacked."""


def stored_tensors(name: str, slot: ParameterSlot, scheme: WeightScheme | None) -> dict[str, StoredTensor]:
    """Return the tensors in which a checkpoint stores the weight `name`, by their names; the first has the codes."""
    if scheme is None or scheme.format is WeightFormat.ROUND_TO_NEAREST:
        return {name: StoredTensor(name, (slot.stored_shape,), frozenset(FLOATS))}
    *outer, rows, columns = slot.stored_shape
    stored = FORMATS[scheme.format].tensors(scheme, rows, columns)
    return {
        _stored_name(name, tensor.name): replace(tensor, shapes=tuple((*outer, *shape) for shape in tensor.shapes))
        for tensor in stored
    }


def _stored_name(name: str, part: str) -> str:
    """Return the name in a checkpoint of one of the tensors of the weight `name`, which may lack the last part."""
    return name if part == "weight" else name.removesuffix("weight") + part


def load_quantized(
    slots: Mapping[str, ParameterSlot],
    schemes: Mapping[str, WeightScheme],
    entries: Mapping[str, TensorEntry],
    on_read: Callable[[int], None],
) -> None:
    """Load the weights named in `schemes` into their slots.

    `on_read` is that of `read_tensors`; it counts all elements of all tensors.
    """
    for batch in _batches(slots, schemes, entries):
        wanted = {name: entries[name] for names in batch.values() for name in names}
        device = next(iter(slots.values())).tensor.device
        read = {
            name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device) for name, entry in wanted.items()
        }
        read_tensors(wanted, read, on_read)
        for name, names in batch.items():
            try:
                _fill_slot(
                    slots[name], schemes[name], {stored_name: read.pop(stored_name) for stored_name in names}, name
                )
            except ModelError as error:
                raise ModelError(f"{wanted[names[0]].file}: {name} {error.message}; it cannot be loaded.") from error


def _batches(
    slots: Mapping[str, ParameterSlot], schemes: Mapping[str, WeightScheme], entries: Mapping[str, TensorEntry]
) -> Iterator[dict[str, list[str]]]:
    """Yield batches of weights in file order, each with the names of its tensors.

    A batch has at most `_BATCH_BYTES`, or a single weight if that is larger.
    """
    stored = {name: _to_read(name, slots, scheme, entries) for name, scheme in schemes.items()}
    batch: dict[str, list[str]] = {}
    size = 0
    for name in sorted(stored, key=lambda name: (entries[stored[name][0]].file, entries[stored[name][0]].start)):
        own = sum(_bytes(entries[stored_name]) for stored_name in stored[name])
        if batch and size + own > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = stored[name]
        size += own
    if batch:
        yield batch


def _to_read(
    name: str, slots: Mapping[str, ParameterSlot], scheme: WeightScheme, entries: Mapping[str, TensorEntry]
) -> list[str]:
    """Return the names of the tensors to read for a weight.

    Biases of the model are left out, because they have slots of their own.
    """
    tensors = stored_tensors(name, slots[name], scheme)
    own = {stored_name for stored_name in tensors if stored_name == name or stored_name not in slots}
    return [
        stored_name
        for stored_name, stored in tensors.items()
        if stored.read and stored_name in own and stored_name in entries
    ]


def _bytes(entry: TensorEntry) -> int:
    return torch.Size(entry.shape).numel() * DTYPES[entry.dtype].itemsize


def _fill_slot(slot: ParameterSlot, scheme: WeightScheme, stored: Mapping[str, Tensor], name: str) -> None:
    """Write a weight to its slot, packed or dequantized."""
    target = slot.tensor
    if scheme.format is WeightFormat.ROUND_TO_NEAREST:
        assert isinstance(target, PackedWeight)
        weight = next(iter(stored.values()))
        weight = slot.values(weight)
        # Stacked experts are rounded one by one, because rounding holds several float32 copies of a matrix.
        experts = range(len(weight)) if weight.dim() > 2 else (...,)
        for index in experts:
            _copy(rounded(weight[index], packing_of(target)), target, index)
        return
    *outer, rows, columns = slot.stored_shape
    names = [tensor.name for tensor in FORMATS[scheme.format].tensors(scheme, rows, columns)]
    tensors = {part: stored[whole] for part in names if (whole := _stored_name(name, part)) in stored}
    if "bias" in tensors and bool(tensors["bias"].any()):
        raise ModelError("has a bias that is not zero, and the model has none there")
    if not outer:
        _fill_matrix(slot, target, FORMATS[scheme.format].read(scheme, tensors, (rows, columns)), name)
        return
    # Stacked experts are read one by one, because reading takes a byte or more for each code.
    own = range(*outer)
    if slot.part is not None and slot.part.dim == 0:
        (own,) = slot.part.ranges
        slot = replace(slot, part=None)
    elif slot.part is not None:
        slot = replace(slot, part=replace(slot.part, shape=(rows, columns), dim=slot.part.dim - 1))
    for index, expert in enumerate(own):
        matrix = {part: tensor[expert] for part, tensor in tensors.items()}
        _fill_matrix(slot, target[index], FORMATS[scheme.format].read(scheme, matrix, (rows, columns)), name)


def _fill_matrix(slot: ParameterSlot, target: Weight, codes: GroupedCodes, name: str) -> None:
    """Write one matrix to its place `target` in a slot, packed or dequantized."""
    if isinstance(target, PackedWeight):
        _copy(codes.packed(packing_of(target), slot.transform, slot.part), target)
    else:
        matrix = codes.matrix()
        check_range(matrix, target.dtype, f"{name}, dequantized,")
        target.copy_(slot.values(matrix))


def _copy(source: PackedWeight, target: PackedWeight, index: int | EllipsisType = ...) -> None:
    for target_part, source_part in zip(target.parts(), source.parts(), strict=True):
        target_part[index].copy_(source_part)
