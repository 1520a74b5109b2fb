"""Loading of a model's adapters into tables, one for each product that any of them changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.adapters.folder import AdapterFolder, LowRank, read_adapter
from engine.config import EngineConfig
from engine.config.attention import AttentionShape
from engine.config.model import GroupedQueryAttention, ModelSpec
from engine.kernels.lora.tables import LoraTables
from engine.kernels.packed_weight import PackedWeight, Weight
from engine.models.allocation import allocate_parameters
from engine.models.families import places_of
from engine.models.parameters import DenseParameters, Parameters, Place
from engine.weights.tensor_reader import check_range, read_tensors
from wire.errors import InvalidArgument, ModelError
from wire.messages import AdapterFacts

LEAST_RANK = 16
"""The least rank that the matrix units of GPUs multiply; ranks are padded to it, and to powers of two above."""


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """The adapters of a model, in the order of their numbers, and the tables of each weight by its `id`."""

    facts: tuple[AdapterFacts, ...] = ()
    tables: Mapping[int, LoraTables] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Stacked:
    """A weight of the parameters, and the row at which each of its parts ends."""

    weight: Weight
    part_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """An update of the rows from `first` on of a stacked weight."""

    stacked: _Stacked
    first: int
    place: Place
    update: LowRank


def load_adapters(config: EngineConfig, spec: ModelSpec, parameters: Parameters) -> LoadedAdapters:
    """Reads the adapters that `config` names.

    InvalidArgument for more of them, or a higher rank, than it allows; ModelError for one that does not fit the model.
    """
    folders = _read(config)
    facts = tuple(
        AdapterFacts(source.name, folder.identity, str(source.path))
        for source, folder in zip(config.adapters, folders, strict=True)
    )
    return LoadedAdapters(facts, _load_tables(folders, spec, parameters) if folders else {})


def check_adapters(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises what `load_adapters` would, without memory for weights."""
    if config.adapters:
        _place(_read(config), spec, allocate_parameters(spec, torch.float32, torch.device("meta")))


def _read(config: EngineConfig) -> list[AdapterFolder]:
    if len(config.adapters) > config.max_loras:
        raise InvalidArgument("max_loras", f"is {config.max_loras}, and {len(config.adapters)} adapters are given")
    folders = []
    for source in config.adapters:
        folder = read_adapter(source.path)
        if folder.rank > config.max_lora_rank:
            raise InvalidArgument(
                "max_lora_rank", f"is {config.max_lora_rank}, and adapter {source.name!r} has rank {folder.rank}"
            )
        folders.append(folder)
    return folders


def _place(folders: Sequence[AdapterFolder], spec: ModelSpec, parameters: Parameters) -> list[list[_Placed]]:
    """Returns the places of each adapter's updates."""
    places, stacked = places_of(spec, parameters), list(_stacked(spec, parameters))
    return [
        [_placed(folder, module, update, places, stacked) for module, update in folder.updates.items()]
        for folder in folders
    ]


def _load_tables(folders: Sequence[AdapterFolder], spec: ModelSpec, parameters: Parameters) -> dict[int, LoraTables]:
    placed = _place(folders, spec, parameters)
    rank = max(LEAST_RANK, 1 << (max(folder.rank for folder in folders) - 1).bit_length())
    tables: dict[int, LoraTables] = {}
    for each in (update.stacked for some in placed for update in some):
        if id(each.weight) not in tables:
            (n, k), device = each.weight.shape, each.weight.device
            zeros = torch.zeros(len(folders), len(each.part_ends) * rank, k, dtype=parameters.dtype, device=device)
            outputs = torch.zeros(len(folders), n, rank, dtype=parameters.dtype, device=device)
            tables[id(each.weight)] = LoraTables(zeros, outputs, each.part_ends)
    for slot, updates in enumerate(placed):
        for update in updates:
            _fill(tables[id(update.stacked.weight)], slot, update)
    return tables


def _stacked(spec: ModelSpec, parameters: Parameters) -> Iterator[_Stacked]:
    """Yields the weights that adapters may change: of attention, and of dense feed-forward networks."""
    for layer, weights in zip(spec.layers, parameters.layers, strict=True):
        attention, inner = weights.attention, weights.feed_forward
        yield _Stacked(attention.output, (len(attention.output),))
        if isinstance(layer.attention, GroupedQueryAttention):
            yield _Stacked(attention.qkv, _ends(layer.attention.shape))  # type: ignore[union-attr]
        if isinstance(inner, DenseParameters):
            yield _Stacked(inner.gate_up, (len(inner.gate_up) // 2, len(inner.gate_up)))
            yield _Stacked(inner.down, (len(inner.down),))


def _ends(shape: AttentionShape) -> tuple[int, int, int]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return q, q + kv, q + 2 * kv


def _placed(
    folder: AdapterFolder, module: str, update: LowRank, places: Mapping[str, Place], stacked: Sequence[_Stacked]
) -> _Placed:
    place = places.get(f"{module}.weight")
    if place is None:
        raise ModelError(f"{folder.path} changes {module}, which the model lacks; is it an adapter of another model?")
    shape = (update.b.shape[0], update.a.shape[1])
    if shape != place.stored_shape:
        raise ModelError(
            f"{folder.path} changes {module} of shape {list(shape)}; the model's has {list(place.stored_shape)}."
        )
    rows = _codes(place.tensor)
    for each in stacked:
        codes = _codes(each.weight)
        first = (rows.storage_offset() - codes.storage_offset()) // codes.stride(0)
        same = rows.untyped_storage()._cdata == codes.untyped_storage()._cdata
        if same and 0 <= first < len(codes) and place.shape is None:
            return _Placed(each, first, place, update)
    raise ModelError(
        f"{folder.path} changes {module}; adapters are served of the linear layers of attention and of dense"
        " feed-forward networks, not of embeddings, experts or latents."
    )


def _codes(weight: Weight) -> Tensor:
    return weight.codes if isinstance(weight, PackedWeight) else weight


def _fill(tables: LoraTables, slot: int, placed: _Placed) -> None:
    """Writes one update into the tables: its A for each part that its rows belong to."""
    update, rank = placed.update, tables.rank
    a, b = (torch.empty(entry.shape, dtype=torch.float32) for entry in (update.a, update.b))
    read_tensors({"a": update.a, "b": update.b}, {"a": a, "b": b})
    if placed.place.transform is not None:
        b = placed.place.transform(b)
    b.mul_(update.scale)
    for each, entry in ((a, update.a), (b, update.b)):
        check_range(each, tables.b.dtype, f"{entry.file}: an update")
    end = placed.first + len(b)
    tables.b[slot, placed.first : end, : update.rank] = b.to(tables.b)
    for part, rows in enumerate(tables.part_rows):
        if rows.start < end and placed.first < rows.stop:
            tables.a[slot, part * rank : part * rank + update.rank] = a.to(tables.a)
