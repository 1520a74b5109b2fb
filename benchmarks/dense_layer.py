"""The layer of a dense model whose layers are all alike, for benchmarks of single operations."""

from engine.config.model import DenseFeedForward, GroupedQueryAttention, ModelSpec


def dense_layer(spec: ModelSpec) -> tuple[GroupedQueryAttention, DenseFeedForward]:
    """Returns the halves of the first layer; ValueError for a mixture of experts or latent attention."""
    attention, feed_forward = spec.layers[0].attention, spec.layers[0].feed_forward
    if not isinstance(attention, GroupedQueryAttention) or not isinstance(feed_forward, DenseFeedForward):
        raise ValueError(f"{spec.architecture} has no dense layers of grouped-query attention")
    return attention, feed_forward
