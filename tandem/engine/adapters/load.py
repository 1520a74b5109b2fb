"""Loads adapters of a model: at the start of the engine, and into free slots while it runs."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.adapters.folder import AdapterFolder
from tandem.engine.adapters.modules import AdaptedModules, PlacedUpdate, Product, adapted_modules
from tandem.engine.adapters.reader import check_unchanged, read_adapter
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.config.sharding import ALONE, Rank
from tandem.engine.kernels.lora_tables import LoraTables
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.parameters import Parameters
from tandem.engine.weights.tensor_reader import check_range, read_tensors
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.protocol.messages import AdapterFacts


class AdapterTables:
    """The LoRA matrices of all adapter slots, for the stacked weights that adapters change.

    The matrices are zero at first. The ranks of all adapters are padded to `rank`.
    """

    def __init__(
        self, products: Mapping[int, Product], slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._tables: dict[int, LoraTables] = {}
        self.by_weight: dict[int, LoraTables] = {}
        """The LoRA matrices for each stacked weight, by the `id` of the weight."""
        for number, product in products.items():
            (n, k), ends = product.shape, product.part_ends
            a = torch.zeros(slots, len(ends) * rank, k, dtype=dtype, device=device)
            b = torch.zeros(slots, n, rank, dtype=dtype, device=device)
            self._tables[number] = self.by_weight[product.weight] = LoraTables(a, b, ends)

    def write(self, slot: int, updates: Sequence[PlacedUpdate]) -> None:
        """Replace the contents of a slot with these updates; the copy is complete on return.

        Any thread may call it. No step may use the slot during the call.
        """
        by_product: dict[int, list[PlacedUpdate]] = defaultdict(list)
        for update in updates:
            by_product[update.slot.product].append(update)
        with torch.inference_mode(), self._beside_steps():
            for number, tables in self._tables.items():
                a, b = _matrices(tables, by_product[number])
                tables.a[slot].copy_(a)
                tables.b[slot].copy_(b)

    @contextlib.contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Run the copies of the `with` block on a separate stream, so that no step waits for them."""
        if self._stream is None:
            yield
            return
        # Wait for the default stream, on which the tables were zeroed.
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _check_size(placed: PlacedUpdate, a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelError unless A, the scaled B, and the output for any input of norm 1 are finite in `dtype`."""
    gains = [torch.linalg.vector_norm(matrix, dtype=torch.float64).item() for matrix in (a, b)]
    if not max(*gains, gains[0] * gains[1]) <= torch.finfo(dtype).max:
        raise ModelError(
            f"{placed.update.a.file}: the update of {placed.module} has numbers that are not finite, or not within"
            f" {dtype}, with its scale of {placed.update.scale:g}; check lora_alpha and the weights."
        )


def _matrices(tables: LoraTables, updates: Sequence[PlacedUpdate]) -> tuple[Tensor, Tensor]:
    """Return the new contents of a slot, in host memory: the stacked A matrices and the stacked scaled B matrices.

    If a module's rows overlap several parts of the stacked weight, the module's A is repeated for each of these parts.
    """
    rank = tables.rank
    into_a, into_b = (torch.zeros(table.shape[1:], dtype=table.dtype) for table in (tables.a, tables.b))
    for placed in updates:
        update, slot = placed.update, placed.slot
        a, b = (torch.empty(entry.shape, dtype=torch.float32) for entry in (update.a, update.b))
        read_tensors({"a": update.a, "b": update.b}, {"a": a, "b": b})
        b.mul_(update.scale)
        for matrix, entry in ((a, update.a), (b, update.b)):
            check_range(matrix, tables.b.dtype, f"{entry.file}: the update of {placed.module}")
        _check_size(placed, a, b, tables.b.dtype)
        a, b = slot.own_matrices(a, b)
        end = slot.first + len(b)
        into_b[slot.first : end, : update.rank] = b.to(into_b)
        for part, rows in enumerate(tables.part_rows):
            if rows.start < end and slot.first < rows.stop:
                into_a[part * rank : part * rank + update.rank] = a.to(into_a)
    return into_a, into_b


LEAST_RANK = 16
"""Minimum rank for the matrix units of GPUs. Lower ranks are padded to it, and others to a power of two."""


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """The adapter slots of a model, and the LoRA tables of each weight by the weight's `id`."""

    slots: AdapterSlots = field(default_factory=AdapterSlots)
    tables: Mapping[int, LoraTables] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Files:
    """Implements `AdapterFiles` for one model.

    It reads adapter folders, checks that they fit the model, and copies their matrices into the slots of `tables`.
    """

    modules: AdaptedModules
    tables: AdapterTables
    max_rank: int

    def read(self, path: Path) -> AdapterFolder:
        """Read a folder and check that the adapter fits the model (`AdapterFiles.read`)."""
        folder = _read(path, self.max_rank)
        self.modules.place(folder)
        return folder

    def write(self, slot: int, folder: AdapterFolder) -> None:
        """Write the matrices into a slot, and check that the files are those that were read (`AdapterFiles.write`)."""
        self.tables.write(slot, self.modules.place(folder))
        check_unchanged(folder)


def load_adapters(config: EngineConfig, spec: ModelSpec, parameters: Parameters, rank: Rank = ALONE) -> LoadedAdapters:
    """Load the adapters that `config` names, and allocate free slots if adapters may be loaded at runtime.

    `spec` is that of the whole model, and `parameters` are the weights of `rank`. Raises InvalidArgument if `config`
    has more adapters than slots or an adapter has a higher rank than `config` allows; ModelError if an adapter does not
    fit the model.
    """
    if not config.has_loras:
        return LoadedAdapters()
    folders, modules = _read_all(config), adapted_modules(spec, parameters, rank)
    placed = [modules.place(folder) for folder in folders]
    changed: Sequence[int] = range(len(modules.products))
    count, lora_rank = config.max_loras, config.max_lora_rank
    if not config.runtime_loras:
        changed = sorted({update.slot.product for updates in placed for update in updates})
        count, lora_rank = len(folders), max(folder.rank for folder in folders)
    device = parameters.final_norm.device
    tables = AdapterTables(
        {number: modules.products[number] for number in changed}, count, _padded(lora_rank), parameters.dtype, device
    )
    slots = AdapterSlots(count, _Files(modules, tables, config.max_lora_rank))
    for source, folder in zip(config.loras, folders, strict=True):
        slots.fill(
            slots.claim(folder.identity, ()), AdapterFacts(source.name, folder.identity, str(folder.path)), folder
        )
    return LoadedAdapters(slots, tables.by_weight)


def check_adapters(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise the errors of `load_adapters` without allocating memory for weights."""
    if config.loras:
        modules = adapted_modules(spec, allocate_parameters(spec, torch.float32, torch.device("meta")))
        for folder in _read_all(config):
            modules.place(folder)


def slot_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the size in bytes of the slots for adapters that are loaded at runtime; 0 without these slots."""
    if not config.runtime_loras:
        return 0
    products = adapted_modules(spec, allocate_parameters(spec, torch.float32, torch.device("meta"))).products
    elements = sum(len(product.part_ends) * product.shape[1] + product.shape[0] for product in products)
    return config.max_loras * _padded(config.max_lora_rank) * elements * dtype.itemsize


def _read_all(config: EngineConfig) -> Sequence[AdapterFolder]:
    if len(config.loras) > config.max_loras:
        raise InvalidArgument("max_loras", f"is {config.max_loras}, and {len(config.loras)} adapters are given")
    return [_read(source.path, config.max_lora_rank) for source in config.loras]


def _read(path: Path, max_rank: int) -> AdapterFolder:
    folder = read_adapter(path)
    if folder.rank > max_rank:
        raise InvalidArgument("max_lora_rank", f"is {max_rank}, and the adapter in {path} has rank {folder.rank}")
    return folder


def _padded(rank: int) -> int:
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())
