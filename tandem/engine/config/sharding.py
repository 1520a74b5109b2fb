"""Tensor parallelism: the part of a model that each rank of a group computes.

The rows of the first products (q, k and v; gate and up) and the columns of the output products are divided among the
ranks, so that each rank computes whole heads and a part of each feed-forward network. The outputs of a rank are a term
of a sum over all ranks. If there are more ranks than KV heads, several ranks hold the same KV head.
"""

from dataclasses import dataclass, replace

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import (
    Attention,
    DenseFeedForward,
    FeedForward,
    GroupedQueryAttention,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Rank:
    """The number of a process in a group of `count` processes that hold one copy of a model together."""

    number: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """True for the rank that embeds the tokens and gets the logits."""
        return self.number == 0

    def rows(self, size: int) -> range:
        """Return this rank's part of `size` rows; the parts are equal except that the last ones may be shorter."""
        most = -(-size // self.count)
        return range(min(self.number * most, size), min((self.number + 1) * most, size))


ALONE = Rank()
"""The only rank of a model on one device."""


def rank_spec(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return the spec of what one of `ranks` ranks computes: fewer heads, and narrower feed-forward networks.

    The vocabulary is not divided. Raises InvalidArgument if the model cannot be divided.
    """
    if ranks == 1:
        return spec
    layers = (
        replace(
            layer,
            attention=_attention(layer.attention, ranks),
            feed_forward=_feed_forward(layer.feed_forward, ranks),
        )
        for layer in spec.layers
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


def _feed_forward(network: FeedForward, ranks: int) -> FeedForward:
    if isinstance(network, DenseFeedForward):
        return replace(network, width=_divided("elements of a feed-forward network", network.width, ranks))
    assert isinstance(network, MixtureOfExperts)
    return replace(
        network,
        width=_divided("elements of an expert", network.width, ranks),
        shared_width=_divided("elements of the shared expert", network.shared_width, ranks),
    )


def _divided(what: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise _indivisible(what, size, ranks)
    return size // ranks


def _indivisible(what: str, size: int, ranks: int) -> InvalidArgument:
    return InvalidArgument(
        "tensor_parallel_size", f"{size} {what} cannot be divided among {ranks} ranks; choose another number of ranks."
    )
