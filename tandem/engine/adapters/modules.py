"""The modules of a model that adapters may change, and their rows in the stacked weights that the kernels multiply."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from tandem.engine.adapters.folder import AdapterFolder, LowRank
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, ModelSpec
from tandem.engine.config.sharding import ALONE, Rank, rank_spec
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tandem.engine.models.parameters import DenseParameters, Parameters
from tandem.engine.models.rank_parameters import rank_slots
from tandem.engine.models.slots import ParameterSlot, StoredPart
from tandem.protocol.errors import ModelError

_SUFFIX = ".weight"


@dataclass(frozen=True, slots=True)
class Product:
    """A stacked weight [N, K] that adapters may change.

    `weight` is the `id` of the weight, and `part_ends` are the rows at which its stacked parts end.
    """

    weight: int
    shape: tuple[int, int]
    part_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleSlot:
    """The place of a module in a stacked weight: its rows begin at row `first`."""

    product: int
    """The number of the stacked weight (`Product`)."""
    first: int
    stored_shape: tuple[int, ...]
    """The shape of the module's weight in the checkpoint."""
    transform: Callable[[Tensor], Tensor] | None
    """A function that reorders the rows of the checkpoint's weight as the kernels need them; None = keep the order."""
    part: StoredPart | None = None
    """The part of the module's weight that this rank holds; None = the whole weight."""

    def own_matrices(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of A [r, K] and B [N, r], with the rows of B in the order of the kernels.

        A is divided along its inputs if the weight is, and B along its outputs.
        """
        if self.part is not None:
            a, b = (self.part.of(a), b) if self.part.dim == 1 else (a, self.part.of(b))
        return a, b if self.transform is None else self.transform(b)


@dataclass(frozen=True, slots=True)
class PlacedUpdate:
    """The LoRA update of a module, and the module's place in a stacked weight."""

    module: str
    slot: ModuleSlot
    update: LowRank


@dataclass(frozen=True, slots=True)
class AdaptedModules:
    """All modules of a model, by their names in the checkpoint.

    It keeps no reference to weights, because the kernels may replace them.
    """

    products: tuple[Product, ...]
    modules: Mapping[str, ModuleSlot | None]
    """The slot of each module; None if adapters of the module are not supported."""

    def place(self, folder: AdapterFolder) -> list[PlacedUpdate]:
        """Return the adapter's updates with their modules' slots. Raises ModelError if one does not fit the model."""
        return [self._placed(folder, module, update) for module, update in folder.updates.items()]

    def _placed(self, folder: AdapterFolder, module: str, update: LowRank) -> PlacedUpdate:
        if module not in self.modules:
            raise ModelError(
                f"{folder.path} changes {module}, which the model lacks; is it an adapter of another model?"
            )
        slot, shape = self.modules[module], (update.b.shape[0], update.a.shape[1])
        if slot is None:
            raise ModelError(
                f"{folder.path} changes {module}; adapters are served of the linear layers of attention and of dense"
                " feed-forward networks, not of embeddings, experts or latents."
            )
        if shape != slot.stored_shape:
            raise ModelError(
                f"{folder.path} changes {module} of shape {list(shape)}; the model's has {list(slot.stored_shape)}."
            )
        return PlacedUpdate(module, slot, update)


def adapted_modules(spec: ModelSpec, parameters: Parameters, rank: Rank = ALONE) -> AdaptedModules:
    """Return the modules of a model that adapters may change.

    `spec` is that of the whole model, and `parameters` are the weights of `rank`. It must be called before the kernels
    prepare the weights; parameters on the `meta` device suffice.
    """
    products: list[Product] = []
    by_storage: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for weight, part_ends in _stacked(rank_spec(spec, rank.count, rank.number), parameters):
        codes = _codes(weight)
        by_storage[_storage(codes)].append((len(products), codes))
        n, k = weight.shape
        products.append(Product(id(weight), (n, k), part_ends))
    modules = {
        name.removesuffix(_SUFFIX): _module_slot(slot, by_storage.get(_storage(_codes(slot.tensor)), ()))
        for name, slot in rank_slots(spec, rank, parameters).items()
        if name.endswith(_SUFFIX)
    }
    return AdaptedModules(tuple(products), modules)


def _module_slot(slot: ParameterSlot, stacked: list[tuple[int, Tensor]] | tuple[()]) -> ModuleSlot | None:
    rows = _codes(slot.tensor)
    for product, codes in stacked:
        first = (rows.storage_offset() - codes.storage_offset()) // codes.stride(0)
        if 0 <= first < len(codes) and slot.shape is None:
            return ModuleSlot(product, first, slot.stored_shape, slot.transform, slot.part)
    return None


def _stacked(spec: ModelSpec, parameters: Parameters) -> Iterator[tuple[Weight, tuple[int, ...]]]:
    """Yield the attention and dense feed-forward weights that adapters may change, each with the ends of its parts."""
    for layer, weights in zip(spec.layers, parameters.layers, strict=True):
        attention, inner = weights.attention, weights.feed_forward
        yield attention.output, (len(attention.output),)
        if isinstance(layer.attention, GroupedQueryAttention):
            yield attention.qkv, _ends(layer.attention)  # type: ignore[union-attr]
        if isinstance(inner, DenseParameters):
            assert isinstance(layer.feed_forward, DenseFeedForward)
            rows = len(inner.gate_up)
            yield inner.gate_up, (rows // 2, rows) if layer.feed_forward.gated else (rows,)
            yield inner.down, (len(inner.down),)


def _ends(attention: GroupedQueryAttention) -> tuple[int, int, int]:
    """Return the ends of the rows of q, which include those of the output gate, of k and of v."""
    q, kv, _ = attention.shape.qkv_rows
    q *= 2 if attention.output_gate else 1
    return q, q + kv, q + 2 * kv


def _codes(weight: Weight) -> Tensor:
    return weight.codes if isinstance(weight, PackedWeight) else weight


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
