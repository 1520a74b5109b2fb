"""Allocates a model's weights: packed if the spec's quantization says so, else plain."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tandem.cost_model.roofline import PackedWeights
from tandem.engine.config.model import (
    ModelSpec,
)
from tandem.engine.config.quantization import STACKED_FORMATS, Codes, Packing, WeightFormat, WeightScheme
from tandem.engine.kernels.held_weight import held_bytes
from tandem.engine.kernels.packed_weight import Float4Weight, PackedWeight, Weight
from tandem.engine.models.families import slots_of
from tandem.engine.models.parameters import (
    Parameters,
    named_weights,
)
from tandem.engine.models.plain_parameters import empty_like, plain_parameters
from tandem.engine.models.slots import ParameterSlot

_T = TypeVar("_T")
_META = torch.device("meta")
_MATRIX = 2
"""The number of dimensions of a weight matrix; the weights of experts have one more."""
_PACKED_FIELDS = {
    "embedding",
    "lm_head",
    "qkv",
    "output",
    "down",
    "query_up",
    "gate_up",
    "weight",
    "projections",
    "decay_up",
    "index_key",
}
"""The fields of `Parameters` whose weights may be packed."""
_PLAIN_FIELDS = {"router", "shared_gate", "head_weights"}
"""The fields that no tool quantizes, even if its configuration includes all linear layers."""
_CODES = {Codes.INT8: torch.int8, Codes.FLOAT8: torch.float8_e4m3fn, Codes.INT4: torch.uint8}
"""The dtype of the codes of a `PackedWeight`; those of a `Float4Weight` are uint8."""


class QuantizedWeights(NamedTuple):
    """The weights of a model that are quantized in the checkpoint, and those of them that stay packed in memory."""

    schemes: Mapping[str, WeightScheme]
    """The scheme of each quantized tensor of the checkpoint, by its name in `slots_of`."""
    packings: Mapping[str, Packing]
    """The format of each packed parameter, by its name in `named_weights`."""
    dequantized: tuple[str, ...]
    """The names of the quantized tensors that are dequantized when they are loaded."""


def allocate_parameters(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Allocate uninitialized weights on `device`.

    On the `meta` device they have shapes but no memory.
    """
    packings = quantized_weights(spec).packings
    if not packings:
        return plain_parameters(spec, dtype, device)
    made: dict[int, Weight] = {}

    def make(path: str, shape: Tensor) -> Weight:
        if id(shape) not in made:
            packing = packings.get(path)
            made[id(shape)] = empty_like(shape, device) if packing is None else empty(shape, packing)
        return made[id(shape)]

    def empty(shape: Tensor, packing: Packing) -> PackedWeight:
        return empty_packed(tuple(shape.shape), packing, device)

    return _mapped(plain_parameters(spec, dtype, _META), make)


def allocate_ends(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Allocate the embedding, the final norm and the output layer.

    All other weights have shapes but no memory.
    """
    shapes = allocate_parameters(spec, dtype, _META)
    embedding = empty_on(device, shapes.embedding)
    head = embedding if shapes.lm_head is shapes.embedding else empty_on(device, shapes.lm_head)
    return replace(shapes, embedding=embedding, lm_head=head, final_norm=empty_on(device, shapes.final_norm))


def empty_on(device: torch.device, tree: _T) -> _T:
    """Return uninitialized weights on `device`, in the shapes of `tree`: a weight, or a tree of dataclasses and tuples.

    A tensor that occurs several times in the tree stays one tensor.
    """
    made: dict[int, Tensor] = {}

    def make(_: str, shape: Tensor) -> Tensor:
        return made.setdefault(id(shape), empty_like(shape, device))

    return _mapped(tree, make)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, *, on_cpu: bool = False) -> int:
    """Return the size of all weights in bytes; see `parameter_bytes`."""
    return parameter_bytes(allocate_parameters(spec, dtype, _META), on_cpu=on_cpu)


def parameter_bytes(parameters: Parameters, *, on_cpu: bool) -> int:
    """Return the size of these weights in bytes.

    Packed weights have the size in which the kernels of a CPU or GPU keep them.
    """
    item_bytes = parameters.dtype.itemsize
    return sum(
        held_bytes(weight, item_bytes, on_cpu=on_cpu) if isinstance(weight, PackedWeight) else weight.nbytes
        for _, weight in named_weights(parameters)
    )


class SavedBytes(NamedTuple):
    """The memory that packed weights save, in bytes, compared with plain weights.

    Packed weights have the size in which the kernels keep them.
    """

    every_step: int
    """The bytes saved in matrices that every step reads."""
    experts: int
    table: int
    """The bytes saved in the embedding; 0 if the embedding is also the output layer."""


def saved_bytes(spec: ModelSpec, item_bytes: int, *, on_cpu: bool) -> SavedBytes:
    """Return the bytes that packed weights save; a plain weight has `item_bytes` bytes per element."""
    if spec.quantization is None:
        return SavedBytes(0, 0, 0)
    every_step = experts = table = 0
    for path, weight in named_weights(allocate_parameters(spec, torch.float32, _META)):
        if isinstance(weight, PackedWeight):
            saved = weight.shape.numel() * item_bytes - held_bytes(weight, item_bytes, on_cpu=on_cpu)
            if path == "embedding" and not spec.tied_embeddings:
                table += saved
            elif len(weight.shape) > 2:
                experts += saved
            else:
                every_step += saved
    return SavedBytes(every_step, experts, table)


def packed_weights(spec: ModelSpec) -> PackedWeights:
    """Return the number and sizes of packed matrices, by the way in which GPUs multiply them.

    Embeddings and experts are not counted.
    """
    if spec.quantization is None:
        return PackedWeights()
    packed = [
        weight
        for path, weight in named_weights(allocate_parameters(spec, torch.float32, _META))
        if isinstance(weight, PackedWeight) and len(weight.shape) == _MATRIX and path != "embedding"
    ]
    unpacked = (matrix.shape.numel() for matrix in packed if not matrix.quantized_inputs)
    float8 = (
        matrix.shape.numel() for matrix in packed if matrix.quantized_inputs and matrix.codes.dtype.is_floating_point
    )
    return PackedWeights(len(packed), sum(unpacked), sum(float8))


@cache
def quantized_weights(spec: ModelSpec) -> QuantizedWeights:
    """Return the quantization scheme of each tensor of the checkpoint, and the format of each packed parameter.

    A parameter is packed if all tensors stacked in it have the same format.
    """
    if spec.quantization is None:
        return QuantizedWeights({}, {}, ())
    shapes = plain_parameters(spec, torch.float32, _META)
    paths = {id(weight.untyped_storage()): path for path, weight in named_weights(shapes) if isinstance(weight, Tensor)}
    schemes: dict[str, WeightScheme] = {}
    formats: dict[str, set[Packing | None]] = {}
    stacked: dict[str, str] = {}
    for name, slot in slots_of(spec, shapes).items():
        assert isinstance(slot.tensor, Tensor)
        stacked[name] = path = paths[id(slot.tensor.untyped_storage())]
        scheme = _scheme(spec, name, slot, path.rpartition(".")[2])
        if scheme is not None:
            schemes[name] = scheme
        formats.setdefault(path, set()).add(None if scheme is None else scheme.packing(slot.tensor.shape[-1]))
    packings = {}
    for path, forms in formats.items():
        form = next(iter(forms))
        if len(forms) == 1 and form is not None and path.rpartition(".")[2] in _PACKED_FIELDS:
            packings[path] = form
    return QuantizedWeights(schemes, packings, tuple(name for name in schemes if stacked[name] not in packings))


def packing_of(weight: PackedWeight) -> Packing:
    """Return the format of a packed weight."""
    is_float4 = isinstance(weight, Float4Weight)
    codes = Codes.FLOAT4 if is_float4 else next(name for name, dtype in _CODES.items() if dtype == weight.codes.dtype)
    scales = str(weight.scales.dtype).removeprefix("torch.")
    return Packing(codes, weight.group, weight.offsets is not None, scales, weight.quantized_inputs)


def _scheme(spec: ModelSpec, name: str, slot: ParameterSlot, field: str) -> WeightScheme | None:
    """Return the quantization scheme of a tensor; None if it is not quantized."""
    assert spec.quantization is not None
    if field in _PLAIN_FIELDS or len(slot.tensor.shape) < 2:
        return None
    scheme = spec.quantization.scheme_of(name.removesuffix(".weight"))
    if scheme is None:
        return None
    if scheme.format is WeightFormat.ROUND_TO_NEAREST:
        return scheme if field in _PACKED_FIELDS and scheme.packing(slot.tensor.shape[-1]) else None
    named = name.endswith(".weight") or scheme.format in STACKED_FORMATS
    # A matrix with the columns of its destination is changed by rows, which codes are, too.
    by_rows = slot.shape is None or (len(slot.shape) == _MATRIX and slot.shape[-1] == slot.tensor.shape[-1])
    return scheme if named and by_rows else None


def empty_packed(shape: tuple[int, ...], packing: Packing, device: torch.device) -> PackedWeight:
    """Return an uninitialized packed weight [..., N, K]."""
    *outer, columns = shape
    scales = partial(torch.empty, (*outer, columns // packing.group), dtype=getattr(torch, packing.scales))
    if packing.codes is Codes.FLOAT4:
        codes = torch.empty(*outer, columns // 2, dtype=torch.uint8, device=device)
        factors = torch.empty(outer, dtype=torch.float32, device=device)
        return Float4Weight(codes, scales(device=device), None, packing.group, factors)
    stored = columns // 2 if packing.codes is Codes.INT4 else columns
    return PackedWeight(
        torch.empty(*outer, stored, dtype=_CODES[packing.codes], device=device),
        scales(device=device),
        scales(device=device) if packing.offsets else None,
        packing.group,
        quantized_inputs=packing.quantized_inputs,
    )


def _mapped(tree: _T, make: Callable[[str, Tensor], Weight], path: str = "") -> _T:
    """Return a copy of a tree of dataclasses and tuples, with each tensor replaced by the result of `make`.

    `path` is the path of the tree's field, as in `named_weights`.
    """
    result: Any = tree
    if isinstance(tree, Tensor):
        result = make(path, tree)
    elif isinstance(tree, tuple):
        result = tuple(_mapped(item, make, f"{path}.{number}") for number, item in enumerate(tree))
    elif is_dataclass(tree):
        start = f"{path}." if path else ""
        values = {field.name: _mapped(getattr(tree, field.name), make, start + field.name) for field in fields(tree)}
        result = replace(tree, **values)  # type: ignore[type-var]  # it is an instance
    mapped: _T = result
    return mapped
