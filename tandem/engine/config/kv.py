"""The layout of the KV cache, derived from a model's spec.

Layers with the same sliding window keep the KV of the same tokens, and so do all layers without a window. These layers
are divided into groups, and the layers of a group share pages. All groups have the same number of layers (some are
padded), so that all pages have the same size and come from one pool.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.engine.config.model import GroupedQueryAttention, LayerSpec, ModelSpec
from tandem.protocol.errors import ModelError

_WASTE = 16
"""Padding may add at most 1 / `_WASTE` to the KV of a request of maximum length."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of layers that store the KV of the same tokens in the same pages."""

    layers: tuple[int, ...]
    """The numbers of the model's layers in this group, in ascending order; at most `depth` layers."""
    depth: int
    """The number of layers in a page, equal for all groups; a group with fewer `layers` is padded."""
    heads: int
    parts: int
    """The number of tensors per token in the KV cache: 2 (keys and values), or 1 (latents of MLA)."""
    dim: int
    """The number of elements per token, part and head."""
    window: int | None = None
    """The sliding window of the layers: the number of positions, with its own, that a token attends to; None = all."""

    @property
    def elements(self) -> int:
        """The number of elements that a page has per token."""
        return self.depth * self.parts * self.heads * self.dim


def kv_groups(spec: ModelSpec) -> tuple[KvGroup, ...]:
    """Return the groups of layers, ordered by window and by layer number; groups without a window come first.

    Raises ModelError if keys and values differ in shape between layers.
    """
    shapes = {_shape_of(layer) for layer in spec.layers}
    if len(shapes) > 1:
        raise ModelError("layers whose keys and values differ in shape are not supported.")
    heads, parts, dim = shapes.pop()
    classes = _classes(spec.layers)
    depth = _depth({window: len(layers) for window, layers in classes.items()}, spec.max_context)
    return tuple(
        KvGroup(tuple(layers[first : first + depth]), depth, heads, parts, dim, window)
        for window, layers in classes.items()
        for first in range(0, len(layers), depth)
    )


def kv_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    """Return the sliding window of each group, None for a group without one."""
    return tuple(group.window for group in kv_groups(spec))


def kv_elements(layers: Iterable[LayerSpec]) -> int:
    """Return the number of elements of one token's keys and values in these layers, without padding."""
    return sum(parts * heads * dim for heads, parts, dim in map(_shape_of, layers))


def window_of(layer: LayerSpec) -> int | None:
    """Return the layer's sliding window: the number of latest positions that a token attends to; None = all."""
    attention = layer.attention
    return attention.shape.window if isinstance(attention, GroupedQueryAttention) else None


def _classes(layers: Sequence[LayerSpec]) -> Mapping[int | None, list[int]]:
    """Return the numbers of the layers with each window; layers without a window (None) come first."""
    numbers: dict[int | None, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        numbers[window_of(layer)].append(number)
    return {window: numbers[window] for window in sorted(numbers, key=lambda window: window or 0)}


def _depth(sizes: Mapping[int | None, int], max_context: int) -> int:
    """Return the number of layers per page with which the model has the fewest groups.

    `_WASTE` limits the padding. It is measured by its memory in a request of `max_context` tokens, so padding of layers
    with a window is cheap.
    """

    def layer_tokens(depth: int) -> int:
        padded = {window: -(-size // depth) * depth for window, size in sizes.items()}
        return sum(size * min(window or max_context, max_context) for window, size in padded.items())

    least = layer_tokens(1)
    fitting = [depth for depth in range(1, max(sizes.values()) + 1) if layer_tokens(depth) <= least + least // _WASTE]
    return min(fitting, key=lambda depth: (sum(-(-size // depth) for size in sizes.values()), layer_tokens(depth)))


def _shape_of(layer: LayerSpec) -> tuple[int, int, int]:
    """Return the number of heads, of parts, and of dimensions of a layer's KV."""
    attention = layer.attention
    if isinstance(attention, GroupedQueryAttention):
        return attention.shape.kv_heads, 2, attention.shape.head_dim
    return 1, 1, attention.shape.cached
