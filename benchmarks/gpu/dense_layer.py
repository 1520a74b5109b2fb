"""The layer of a dense model whose layers are all alike, for benchmarks of single operations."""

from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, ModelSpec
from tandem.engine.models.shapes import shape_config, shape_names
from tandem.protocol.errors import InvalidArgument


def dense_layer(spec: ModelSpec) -> tuple[GroupedQueryAttention, DenseFeedForward]:
    """Returns the halves of the first layer; InvalidArgument for a mixture of experts or latent attention."""
    attention, feed_forward = spec.layers[0].attention, spec.layers[0].feed_forward
    if not isinstance(attention, GroupedQueryAttention) or not isinstance(feed_forward, DenseFeedForward):
        raise InvalidArgument("--shape", f"{spec.architecture} has no dense layers of grouped-query attention")
    return attention, feed_forward


def dense_shapes() -> list[str]:
    """Returns the names of the shapes that `dense_layer` accepts."""
    return [name for name in shape_names() if _is_dense(shape_config(name))]


def _is_dense(spec: ModelSpec) -> bool:
    return all(
        isinstance(layer.attention, GroupedQueryAttention) and isinstance(layer.feed_forward, DenseFeedForward)
        for layer in spec.layers
    )
