"""The shape of the KV cache, from a model's specification."""

from dataclasses import dataclass

from engine.config.model import GroupedQueryAttention, LayerSpec, ModelSpec
from wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV of the same tokens lies in the same pages."""

    layers: tuple[int, ...]
    """Numbers of the model's layers, in order."""
    heads: int
    parts: int
    """2 for keys and values, 1 for latents."""
    dim: int
    """Elements of each part and head."""

    @property
    def elements(self) -> int:
        """Elements of one token in all layers of the group."""
        return len(self.layers) * self.parts * self.heads * self.dim


def kv_group(spec: ModelSpec) -> KvGroup:
    """Returns the group of all layers; ModelError if their keys and values differ in shape."""
    shapes = {_shape_of(layer) for layer in spec.layers}
    if len(shapes) > 1:
        raise ModelError("layers whose keys and values differ in shape are not supported.")
    heads, parts, dim = shapes.pop()
    return KvGroup(tuple(range(len(spec.layers))), heads, parts, dim)


def _shape_of(layer: LayerSpec) -> tuple[int, int, int]:
    """Returns heads, parts and dimensions of a layer's KV."""
    attention = layer.attention
    if isinstance(attention, GroupedQueryAttention):
        return attention.shape.kv_heads, 2, attention.shape.head_dim
    return 1, 1, attention.shape.cached
