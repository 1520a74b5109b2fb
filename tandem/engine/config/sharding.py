"""Tensor parallelism: which part of a model each rank of a group computes.

The rows of the q, k, v, gate and up weights and the columns of the output and down weights are divided among the ranks,
so that each rank computes whole attention heads and a part of each feed-forward network. The outputs of all ranks are
then summed. If there are more ranks than KV heads, several ranks hold the same KV head.

A mixture of experts is divided in one of two ways: each rank has a part of each expert, or it has some experts as a
whole (expert parallelism). Parts give all ranks the same work, so experts are whole only if their width is not
divisible, or if parts would lose their quantization (docs/decisions/tensor_parallelism.md).
"""

from dataclasses import dataclass, replace

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.kv import kv_groups
from tandem.engine.config.model import (
    Attention,
    DenseFeedForward,
    FeedForward,
    GroupedQueryAttention,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.quantization import Quantization
from tandem.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank: process `number`, counted from 0, of the `count` processes that together hold one copy of a model."""

    number: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """True for the first rank, which computes the embeddings of tokens and gets the logits."""
        return self.number == 0

    def rows(self, size: int) -> range:
        """Return the range of this rank's rows if `size` rows are divided among the ranks.

        All ranks have the same number of rows, except that the last ranks may have fewer or none.
        """
        most = -(-size // self.count)
        return range(min(self.number * most, size), min((self.number + 1) * most, size))


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


def page_part(spec: ModelSpec, rank: Rank) -> PagePart:
    """Return the part of a page that `rank` has; `spec` describes the whole model."""
    group = kv_groups(spec)[0]
    own = kv_groups(rank_spec(spec, rank.count))[0].heads
    # If there are more ranks than KV heads, several ranks have the same head.
    return PagePart(group.heads, group.depth, first_head=rank.number * (group.heads // own) // rank.count * own)


def rank_spec(spec: ModelSpec, ranks: int, number: int = 0) -> ModelSpec:
    """Return the spec of one rank's part of a model: fewer heads, and narrower feed-forward networks or fewer experts.

    The specs of the ranks differ only in the numbers of their experts. The vocabulary is not divided. Raises
    InvalidArgument if the model cannot be divided among `ranks` ranks.
    """
    if ranks == 1:
        return spec
    rank = Rank(number, ranks)
    layers = (
        replace(
            layer,
            attention=_attention(layer.attention, ranks),
            feed_forward=_feed_forward(layer.feed_forward, rank, spec.quantization),
        )
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def computed_spec(spec: ModelSpec, rank: Rank) -> ModelSpec:
    """Return the spec of the matrices that one rank computes: `rank_spec`, and its rows of the output layer.

    `spec` is that of the whole model.
    """
    return replace(rank_spec(spec, rank.count), vocab_size=len(rank.rows(spec.vocab_size)))


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
    heads = _divided("attention heads", attention.shape.heads, ranks)
    if not isinstance(attention, GroupedQueryAttention):
        return replace(attention, shape=replace(attention.shape, heads=heads))
    shape = attention.shape
    if attention.qk_norm > shape.head_dim:
        raise _indivisible("the norm over all heads of a query", attention.qk_norm, ranks)
    return replace(attention, shape=replace(shape, heads=heads, kv_heads=_kv_heads(shape, ranks)))


def _kv_heads(shape: AttentionShape, ranks: int) -> int:
    if shape.kv_heads % ranks == 0:
        return shape.kv_heads // ranks
    if ranks % shape.kv_heads:
        raise _indivisible("KV heads", shape.kv_heads, ranks)
    return 1


def _feed_forward(network: FeedForward, rank: Rank, quantization: Quantization | None) -> FeedForward:
    ranks = rank.count
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
