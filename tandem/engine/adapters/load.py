"""Loading of a model's adapters: at the start, and into free slots while the engine runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tandem.engine.adapters.folder import AdapterFolder
from tandem.engine.adapters.modules import AdaptedModules, adapted_modules
from tandem.engine.adapters.reader import check_unchanged, read_adapter
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.adapters.tables import AdapterTables
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.lora.tables import LoraTables
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.parameters import Parameters
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import AdapterFacts

LEAST_RANK = 16
"""The least rank that the matrix units of GPUs multiply; ranks are padded to it, and to powers of two above."""


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """The adapters of a model, and the tables of each weight by its `id`."""

    slots: AdapterSlots = field(default_factory=AdapterSlots)
    tables: Mapping[int, LoraTables] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Files:
    """The adapters that fit the model, on disk."""

    modules: AdaptedModules
    tables: AdapterTables
    max_rank: int

    def read(self, path: Path) -> AdapterFolder:
        """See `AdapterFiles`."""
        folder = _read(path, self.max_rank)
        self.modules.place(folder)
        return folder

    def write(self, slot: int, folder: AdapterFolder) -> None:
        """See `AdapterFiles`."""
        self.tables.write(slot, self.modules.place(folder))
        check_unchanged(folder)


def load_adapters(config: EngineConfig, spec: ModelSpec, parameters: Parameters) -> LoadedAdapters:
    """Reads the adapters that `config` names, and keeps slots for others if it says so.

    InvalidArgument for more of them, or a higher rank, than it allows; ModelError for one that does not fit the model.
    """
    if not config.has_loras:
        return LoadedAdapters()
    folders, modules = _read_all(config), adapted_modules(spec, parameters)
    placed = [modules.place(folder) for folder in folders]
    changed: Sequence[int] = range(len(modules.products))
    count, rank = config.max_loras, config.max_lora_rank
    if not config.runtime_loras:
        changed = sorted({update.place.product for each in placed for update in each})
        count, rank = len(folders), max(folder.rank for folder in folders)
    device = parameters.final_norm.device
    tables = AdapterTables(
        {number: modules.products[number] for number in changed}, count, _padded(rank), parameters.dtype, device
    )
    slots = AdapterSlots(count, _Files(modules, tables, config.max_lora_rank))
    for source, folder in zip(config.adapters, folders, strict=True):
        slots.fill(
            slots.claim(folder.identity, ()), AdapterFacts(source.name, folder.identity, str(folder.path)), folder
        )
    return LoadedAdapters(slots, tables.by_weight)


def check_adapters(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises what `load_adapters` would, without memory for weights."""
    if config.adapters:
        modules = adapted_modules(spec, allocate_parameters(spec, torch.float32, torch.device("meta")))
        for folder in _read_all(config):
            modules.place(folder)


def slot_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of the slots for adapters that are loaded while the engine runs; 0 if there are none."""
    if not config.runtime_loras:
        return 0
    products = adapted_modules(spec, allocate_parameters(spec, torch.float32, torch.device("meta"))).products
    elements = sum(len(each.part_ends) * each.shape[1] + each.shape[0] for each in products)
    return config.max_loras * _padded(config.max_lora_rank) * elements * dtype.itemsize


def _read_all(config: EngineConfig) -> Sequence[AdapterFolder]:
    if len(config.adapters) > config.max_loras:
        raise InvalidArgument("max_loras", f"is {config.max_loras}, and {len(config.adapters)} adapters are given")
    return [_read(source.path, config.max_lora_rank) for source in config.adapters]


def _read(path: Path, max_rank: int) -> AdapterFolder:
    folder = read_adapter(path)
    if folder.rank > max_rank:
        raise InvalidArgument("max_lora_rank", f"is {max_rank}, and the adapter in {path} has rank {folder.rank}")
    return folder


def _padded(rank: int) -> int:
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())
