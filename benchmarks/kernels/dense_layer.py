"""The layer of a dense model, whose layers are all alike, and its weight-streaming matrix products."""

from dataclasses import dataclass, replace

from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, ModelSpec
from tandem.engine.config.sharding import Rank, rank_spec
from tandem.engine.kernels.linear import triton_linear
from tandem.engine.models.shapes import shape_config, shape_names
from tandem.protocol.errors import InvalidArgument

STORE, GATE_UP, ADD = (int(op.value) for op in (triton_linear.STORE, triton_linear.GATE_UP, triton_linear.ADD))


def dense_layer(spec: ModelSpec) -> tuple[GroupedQueryAttention, DenseFeedForward]:
    """Return the attention and the feed-forward part of the first layer.

    Raises InvalidArgument for a mixture of experts or for latent attention.
    """
    attention, feed_forward = spec.layers[0].attention, spec.layers[0].feed_forward
    if not isinstance(attention, GroupedQueryAttention) or not isinstance(feed_forward, DenseFeedForward):
        raise InvalidArgument("--shape", f"{spec.architecture} has no dense layers of grouped-query attention")
    return attention, feed_forward


def dense_shapes() -> list[str]:
    """Return the names of the shapes that `dense_layer` accepts."""
    return [name for name in shape_names() if _is_dense(shape_config(name))]


def rank_shape(name: str, ranks: int) -> ModelSpec:
    """Return the part of a shape that the first of `ranks` ranks computes."""
    whole = shape_config(name)
    return replace(rank_spec(whole, ranks), vocab_size=len(Rank(0, ranks).rows(whole.vocab_size)))


def _is_dense(spec: ModelSpec) -> bool:
    return all(
        isinstance(layer.attention, GroupedQueryAttention) and isinstance(layer.feed_forward, DenseFeedForward)
        for layer in spec.layers
    )


@dataclass(frozen=True)
class Product:
    """One weight [n, k] of a model, and the operation that uses it."""

    name: str
    n: int
    k: int
    op: int
    normed: bool

    @property
    def paired(self) -> bool:
        """True if the rows of the weight are interleaved pairs of gate and up."""
        return self.op == GATE_UP

    @property
    def outputs(self) -> int:
        """The number of output columns."""
        return self.n // 2 if self.paired else self.n


@dataclass(frozen=True)
class Model:
    """The matrix products of a model: four per layer, and the output layer."""

    name: str
    layers: int
    products: tuple[Product, ...]


def model_of(name: str, shape: ModelSpec) -> Model:
    """Return the products of a shape, the output layer last."""
    attention, feed_forward = dense_layer(shape)
    hidden, inner = shape.hidden_size, feed_forward.width
    products = (
        Product("qkv", attention.shape.qkv_size, hidden, STORE, normed=True),
        Product("o", hidden, attention.shape.heads * attention.shape.head_dim, ADD, normed=False),
        Product("gate_up", 2 * inner, hidden, GATE_UP, normed=True),
        Product("down", hidden, inner, ADD, normed=False),
        Product("head", shape.vocab_size, hidden, STORE, normed=True),
    )
    return Model(name, len(shape.layers), products)
