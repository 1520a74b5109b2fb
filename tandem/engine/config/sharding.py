"""Tensor and pipeline parallelism: which part of a model each rank of a group computes.

The layers are divided among pipeline stages, in order. Within a stage, the rows of the q, k, v, gate and up weights and
the columns of the output and down weights are divided among the stage's ranks, so that each rank computes whole
attention heads and a part of each feed-forward network. The outputs of all ranks of the stage are then summed. If there
are more ranks than KV heads, several ranks hold the same KV head.

A mixture of experts is divided in one of two ways: each rank has a part of each expert, or it has some experts as a
whole (expert parallelism). Parts give all ranks the same work, so experts are whole only if their width is not
divisible, or if parts would lose their quantization (docs/decisions/tensor_parallelism.md).
"""

from dataclasses import dataclass, replace
from itertools import chain

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.kv import kv_groups, kv_layer_of, page_layers
from tandem.engine.config.model import (
    Attention,
    DenseFeedForward,
    FeedForward,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.quantization import Quantization
from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, StateLayer
from tandem.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank: one of the `count` · `stages` processes that together hold one copy of a model."""

    number: int = 0
    """The number of the rank within its stage, counted from 0."""
    count: int = 1
    """The number of ranks of each stage."""
    stage: int = 0
    """The number of the rank's pipeline stage, counted from 0."""
    stages: int = 1
    divides_tokens: bool = False
    """True if each rank has the whole model, and the tokens of a step are divided (`parallel/context_model.py`)."""

    @classmethod
    def of(cls, world_number: int, count: int, stages: int) -> "Rank":
        """Return the rank with this number in a group of `stages` stages with `count` ranks each."""
        return cls(world_number % count, count, stages - 1 - world_number // count, stages)

    @property
    def world_number(self) -> int:
        """The number of the rank in the whole group, from the last stage to the first, so that 0 leads."""
        return (self.stages - 1 - self.stage) * self.count + self.number

    @property
    def world_size(self) -> int:
        """The number of ranks of the whole group."""
        return self.count * self.stages

    @property
    def embeds(self) -> bool:
        """True for the first rank of the first stage, which computes the embeddings of tokens."""
        return self.stage == 0 and self.number == 0

    @property
    def in_last_stage(self) -> bool:
        """True for the ranks of the last stage, which have the output layer."""
        return self.stage == self.stages - 1

    @property
    def leads(self) -> bool:
        """True for the first rank of the last stage, which gets the logits, and thus schedules and samples."""
        return self.world_number == 0

    def rows(self, size: int) -> range:
        """Return the range of this rank's rows if `size` rows are divided among the ranks of its stage.

        All ranks have the same number of rows, except that the last ranks may have fewer or none.
        """
        most = -(-size // self.count)
        return range(min(self.number * most, size), min((self.number + 1) * most, size))

    def page_layers(self, depth: int) -> range:
        """Return the numbers of those layers of a page with `depth` layers that a page of this rank has.

        If `depth` cannot be divided by the number of stages, some stages have one layer more than others.
        """
        return range(-(-self.stage * depth // self.stages), -(-(self.stage + 1) * depth // self.stages))


ALONE = Rank()
"""The rank of a process that holds a whole model."""


@dataclass(frozen=True, slots=True)
class PagePart:
    """The part of a KV page of the whole model that one rank's page has: consecutive heads of consecutive layers."""

    heads: int
    """Number of KV heads of the whole model; 1 for latents, which every rank has."""
    layers: int
    """Number of layers of a page of the whole model."""
    first_head: int = 0
    first_layer: int = 0


def page_parts(spec: ModelSpec, rank: Rank) -> tuple[PagePart, ...]:
    """Return the part of a page of each group of layers that `rank` has; `spec` describes the whole model."""
    parts = []
    for group, own in zip(kv_groups(spec), kv_groups(rank_spec(spec, rank.count)), strict=True):
        # If there are more ranks than KV heads, several ranks have the same head.
        first_head = rank.number * (group.heads // own.heads) // rank.count * own.heads
        parts.append(PagePart(group.heads, group.depth, first_head, rank.page_layers(group.depth).start))
    return tuple(parts)


def rank_spec(spec: ModelSpec, ranks: int, number: int = 0) -> ModelSpec:
    """Return the spec of one rank's part of a model: fewer heads, and narrower feed-forward networks or fewer experts.

    The specs of the ranks differ only in the numbers of their experts. The vocabulary is not divided. Raises
    InvalidArgument if the model cannot be divided among `ranks` ranks.
    """
    if ranks == 1:
        return spec
    if spec.layer_embedding:
        raise InvalidArgument(
            "tensor_parallel_size",
            f"a model with embeddings of each layer cannot be divided among {ranks} ranks; use one rank.",
        )
    rank = Rank(number, ranks)
    layers = (
        replace(
            layer,
            attention=_attention(layer.attention, ranks),
            feed_forward=_feed_forward(layer.feed_forward, rank, spec.quantization),
        )
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers), page_layers=page_layers(spec))


def check_token_division(spec: ModelSpec, ranks: int) -> None:
    """Raise InvalidArgument if `ranks` ranks with the whole model cannot divide the tokens of prompts among them."""
    if ranks > 1 and spec.has_states:
        raise InvalidArgument(
            "context_parallel_size",
            "a state depends on all earlier tokens, so the tokens of a model with state layers cannot be divided;"
            " choose 1, or a tensor parallel size.",
        )
    if ranks > 1 and spec.layer_embedding:
        raise InvalidArgument("context_parallel_size", "embeddings of each layer are computed by one rank only; use 1.")


def own_spec(spec: ModelSpec, rank: Rank) -> ModelSpec:
    """Return the spec of the part of a model that `rank` holds: `rank_spec`, with the layers of the rank's stage only.

    Raises InvalidArgument if the model cannot be divided among the ranks or stages.
    """
    divided = rank_spec(spec, rank.count, rank.number)
    if rank.stages == 1:
        return divided
    layers = stage_layers(spec, rank.stages)[rank.stage]
    own = divided.layers[layers.start : layers.stop]
    return replace(divided, layers=own, page_layers=_stage_page_layers(spec, rank))


def stage_layers(spec: ModelSpec, stages: int) -> tuple[range, ...]:
    """Return the numbers of the layers of each stage.

    Each stage has the layers of a part of a page (`Rank.page_layers`), the same part for all groups of layers. So a
    request has the same page numbers on all ranks. Raises InvalidArgument if a stage would have no layer, or if its
    layers would not be consecutive or would be grouped in another way.
    """
    if stages == 1:
        return (range(len(spec.layers)),)
    if any(kv_layer_of(layer) is not None or _shares_choice(layer) for layer in spec.layers):
        raise InvalidArgument(
            "pipeline_parallel_size",
            "layers that share keys and values, or the tokens that sparse attention reads, cannot be divided among"
            " stages; use 1.",
        )
    groups = kv_groups(spec)
    divided = []
    for stage in range(stages):
        rank = Rank(stage=stage, stages=stages)
        parts = [rank.page_layers(group.depth) for group in groups]
        own = [group.layers[part.start : part.stop] for group, part in zip(groups, parts, strict=True)]
        numbers = sorted(chain.from_iterable(own))
        if not all(own) or [*range(numbers[0], numbers[-1] + 1)] != numbers or _grouped(spec, numbers, rank) != own:
            raise InvalidArgument(
                "pipeline_parallel_size",
                f"the model's {len(spec.layers)} layers, whose KV is in {len(groups)} groups, cannot be divided among"
                f" {stages} stages; choose fewer stages, or 1.",
            )
        divided.append(range(numbers[0], numbers[-1] + 1))
    return tuple(divided)


def _shares_choice(layer: LayerSpec) -> bool:
    return isinstance(layer.attention, LatentAttention) and layer.attention.shares_choice


def _grouped(spec: ModelSpec, numbers: list[int], rank: Rank) -> list[tuple[int, ...]]:
    """Return the groups of these consecutive layers, if they were a model with the pages of a rank's stage."""
    layers = spec.layers[numbers[0] : numbers[-1] + 1]
    groups = kv_groups(replace(spec, layers=layers, page_layers=_stage_page_layers(spec, rank)))
    return [tuple(numbers[layer] for layer in group.layers) for group in groups]


def _stage_page_layers(spec: ModelSpec, rank: Rank) -> tuple[int, ...]:
    """Return the number of layers of each class in a page of the rank's stage."""
    return tuple(len(rank.page_layers(depth)) for depth in page_layers(spec))


def computed_spec(spec: ModelSpec, rank: Rank) -> ModelSpec:
    """Return the spec of the matrices that one rank computes: `own_spec`, and its rows of the output layer.

    `spec` is that of the whole model.
    """
    return replace(own_spec(spec, rank), vocab_size=len(rank.rows(spec.vocab_size)))


def local_experts_spec(spec: ModelSpec, gpus: int) -> ModelSpec:
    """Return the spec of what each of `gpus` GPUs holds if each has whole experts, and all of the other weights.

    The number of a layer's experts is rounded up: some GPUs then hold copies of experts. Raises InvalidArgument if the
    model has no experts.
    """
    networks = [layer.feed_forward for layer in spec.layers]
    if not any(isinstance(network, MixtureOfExperts) for network in networks):
        raise InvalidArgument("model", "it has no experts that could be divided among GPUs; give another model.")
    layers = (
        replace(layer, feed_forward=replace(network, local=range(-(-network.experts // gpus))))
        if isinstance(network, MixtureOfExperts)
        else layer
        for layer, network in zip(spec.layers, networks, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _attention(attention: Attention, ranks: int) -> Attention:
    if isinstance(attention, StateLayer):
        return _state_layer(attention, ranks)
    heads = _divided("attention heads", attention.shape.heads, ranks)
    if not isinstance(attention, GroupedQueryAttention):
        return replace(attention, shape=replace(attention.shape, heads=heads))
    shape = attention.shape
    if attention.qk_norm > shape.head_dim:
        raise _indivisible("the norm over all heads of a query", attention.qk_norm, ranks)
    return replace(attention, shape=replace(shape, heads=heads, kv_heads=_kv_heads(shape, ranks)))


def _state_layer(layer: StateLayer, ranks: int) -> StateLayer:
    """Return a rank's part of a state layer: some of its heads, each with its whole state."""
    heads = _divided("heads of a state layer", layer.state.heads, ranks)
    if isinstance(layer, GatedDeltaNet):
        return replace(layer, key_heads=heads, value_heads=layer.value_heads // ranks)
    if isinstance(layer, KimiDeltaAttention):
        return replace(layer, heads=heads)
    if isinstance(layer, Mamba2):
        norms = _divided("parts of the norm of a state layer", layer.norm_groups, ranks)
        return replace(layer, heads=layer.heads // ranks, groups=heads, norm_groups=norms)
    return replace(layer, channels=layer.channels // ranks, blocks=heads)


def _kv_heads(shape: AttentionShape, ranks: int) -> int:
    if shape.kv_heads % ranks == 0:
        return shape.kv_heads // ranks
    if ranks % shape.kv_heads:
        raise _indivisible("KV heads", shape.kv_heads, ranks)
    return 1


def _feed_forward(network: FeedForward | None, rank: Rank, quantization: Quantization | None) -> FeedForward | None:
    ranks = rank.count
    if network is None:
        return None
    if isinstance(network, DenseFeedForward):
        return replace(network, width=_divided("elements of a feed-forward network", network.width, ranks))
    assert isinstance(network, MixtureOfExperts)
    shared = _divided("elements of the shared expert", network.shared_width, ranks)
    if network.experts % ranks == 0 and not _divides_into_parts(network.width, ranks, quantization):
        return replace(network, local=rank.rows(network.experts), shared_width=shared)
    return replace(network, width=_divided("elements of an expert", network.width, ranks), shared_width=shared)


def _divides_into_parts(width: int, ranks: int, quantization: Quantization | None) -> bool:
    """Return True if `width` columns divide into equal parts, which are kept quantized if the whole is."""
    if width % ranks:
        return False
    schemes = [scheme for _, scheme in quantization.rules if scheme] if quantization else []
    return all(scheme.packing(width // ranks) for scheme in schemes if scheme.packing(width))


def _divided(what: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise _indivisible(what, size, ranks)
    return size // ranks


def _indivisible(what: str, size: int, ranks: int) -> InvalidArgument:
    return InvalidArgument(
        "tensor_parallel_size", f"{size} {what} cannot be divided among {ranks} ranks; choose another number of ranks."
    )
