"""The layout of the KV cache, derived from a model's spec.

Layers with the same sliding window keep the KV of the same tokens, and so do all layers without a window. Layers whose
window and whose KV per token are equal form a class. The layers of a class are divided into groups, and the layers of a
group share pages. All pages have the same size in bytes and come from one pool. So layers with more KV per token have
fewer layers in a page, and the pages of some groups have unused space at their end.

State layers keep a state instead of KV. They are classes of their own: a page has the states of the layers of a group.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tandem.engine.config.attention import StateShape
from tandem.engine.config.model import GroupedQueryAttention, LatentAttention, LayerSpec, ModelSpec
from tandem.engine.config.state_layers import StateLayer
from tandem.protocol.errors import ModelError
from tandem.protocol.kv_pages import STATE

WASTE = 16
"""Padding may add at most 1 / `WASTE` to the KV of a request of maximum length, or to the states of a request."""
ALIGNMENT = 16
"""The states of each head begin at a multiple of this number of bytes in a page."""
_STATE_BYTES = 4
"""The size of an element of a recurrent state, which is float32."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of layers that store the KV of the same tokens in the same pages."""

    layers: tuple[int, ...]
    """The numbers of the model's layers in this group, in ascending order; at most `depth` layers."""
    depth: int
    """The number of layers in a page; a group with fewer `layers` is padded."""
    heads: int
    dims: tuple[int, ...]
    """The number of elements per token and head of each part: of keys and of values, or of the latents of MLA."""
    window: int | None = None
    """The sliding window of the layers: the number of positions, with its own, that a token attends to; None = all."""

    @property
    def elements(self) -> int:
        """The number of elements that a page has per token."""
        return self.depth * self.heads * sum(self.dims)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """A group of state layers whose states are in the same pages."""

    layers: tuple[int, ...]
    """The numbers of the model's layers in this group, in ascending order; at most `depth` layers."""
    depth: int
    """The number of layers in a page; a group with fewer `layers` is padded."""
    shape: StateShape

    @property
    def heads(self) -> int:
        """The number of heads of a layer; each has a state of its own."""
        return self.shape.heads

    @property
    def window(self) -> int:
        """The entry of this group in `KvPages.windows`."""
        return STATE


PageGroup = KvGroup | StateGroup
_KvShape = tuple[int, tuple[int, ...]]
"""The number of heads of a layer's KV, and the number of dimensions of each of its parts (`KvGroup.dims`)."""
_LayerClass = tuple[int | None, _KvShape | StateShape]
"""The window of a class of layers, and the shape of their KV or states."""


def kv_groups(spec: ModelSpec) -> tuple[PageGroup, ...]:
    """Return the groups of layers, ordered by window and by layer number.

    Groups without a window come first, groups of state layers last. Raises ModelError if all layers are state layers.
    """
    groups: list[PageGroup] = []
    for depth, ((window, shape), layers) in zip(page_layers(spec), _classes(spec.layers).items(), strict=True):
        for first in range(0, len(layers), depth):
            own = tuple(layers[first : first + depth])
            if isinstance(shape, StateShape):
                groups.append(StateGroup(own, depth, shape))
            else:
                groups.append(KvGroup(own, depth, *shape, window))
    return tuple(groups)


def page_layers(spec: ModelSpec, state_layers: Callable[[StateShape], int] = lambda _: 1) -> tuple[int, ...]:
    """Return the number of layers per page of each class of layers, in the order of `kv_groups`.

    Unless `ModelSpec.page_layers` has them, a page has `state_layers(shape)` state layers, but not more than there are.
    Raises ModelError as `kv_groups` does.
    """
    if spec.page_layers:
        return spec.page_layers
    classes = _classes(spec.layers)
    depths = _depths({key: layers for key, layers in classes.items() if key[0] != STATE}, spec.max_context)
    return tuple(
        min(len(layers), state_layers(shape)) if isinstance(shape, StateShape) else depths[window, shape]
        for (window, shape), layers in classes.items()
    )


def kv_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    """Return the entry of each group in `KvPages.windows`: its sliding window, None, or STATE."""
    return tuple(group.window for group in kv_groups(spec))


def kv_elements(layers: Iterable[LayerSpec]) -> int:
    """Return the number of elements of one token's keys and values in these layers, without padding."""
    return sum(
        _elements(_kv_shape(layer)) for layer in layers if state_of(layer) is None and kv_layer_of(layer) is None
    )


def page_elements(spec: ModelSpec) -> int:
    """Return the maximum number of elements per token that a page of any group with KV has."""
    return max(group.elements for group in kv_groups(spec) if isinstance(group, KvGroup))


def layer_bytes(shape: StateShape, item_bytes: int) -> int:
    """Return the bytes of one layer's state; `item_bytes` is the size of an element of the model's dtype."""
    return shape.heads * head_bytes(shape, item_bytes)


def head_bytes(shape: StateShape, item_bytes: int) -> int:
    """Return the bytes of one head's recurrent state, convolution inputs, and padding."""
    used = recurrent_bytes(shape) + shape.channels * shape.inputs * item_bytes
    return -(-used // ALIGNMENT) * ALIGNMENT


def recurrent_bytes(shape: StateShape) -> int:
    """Return the bytes of one head's recurrent state, after which the convolution inputs begin."""
    return prod(shape.state) * _STATE_BYTES if shape.state else 0


def state_of(layer: LayerSpec) -> StateShape | None:
    """Return the shape of the layer's state; None if it is no state layer."""
    return layer.attention.state if isinstance(layer.attention, StateLayer) else None


def kv_layer_of(layer: LayerSpec) -> int | None:
    """Return the number of the layer whose keys and values this layer uses; None if it has its own, or a state."""
    return layer.attention.kv_layer if isinstance(layer.attention, GroupedQueryAttention) else None


def window_of(layer: LayerSpec) -> int | None:
    """Return the maximum number of latest positions that a token attends to: a window or a chunk; None = all."""
    attention = layer.attention
    return attention.shape.most_seen if isinstance(attention, GroupedQueryAttention) else None


def _classes(layers: Sequence[LayerSpec]) -> Mapping[_LayerClass, list[int]]:
    """Return the numbers of the layers of each class that have KV or states, in the order of `kv_groups`."""
    numbers: dict[_LayerClass, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        if kv_layer_of(layer) is not None:
            continue
        state = state_of(layer)
        numbers[(window_of(layer), _kv_shape(layer)) if state is None else (STATE, state)].append(number)
    order = sorted(numbers, key=lambda key: (key[0] == STATE, key[0] or 0))
    return {key: numbers[key] for key in order}


def _depths(classes: Mapping[_LayerClass, Sequence[int]], max_context: int) -> Mapping[_LayerClass, int]:
    """Return the number of layers per page of each class with which the model has the fewest groups.

    `WASTE` limits the padding, unless every page size wastes more. It is measured by its memory in a request of
    `max_context` tokens, so padding of layers with a window is cheap.
    """
    if not classes:
        raise ModelError("models of state layers without any attention are not supported.")
    elements = {key: _elements(key[1]) for key in classes if not isinstance(key[1], StateShape)}

    def groups(page: int) -> Mapping[_LayerClass, int]:
        return {key: -(-len(layers) // (page // elements[key])) for key, layers in classes.items()}

    def memory(page: int) -> int:
        return page * sum(min(key[0] or max_context, max_context) * count for key, count in groups(page).items())

    pages = sorted(
        {
            depth * elements[key]
            for key, layers in classes.items()
            for depth in range(1, len(layers) + 1)
            if depth * elements[key] >= max(elements.values())
        }
    )
    least = sum(
        len(layers) * elements[key] * min(key[0] or max_context, max_context) for key, layers in classes.items()
    )
    fitting = [page for page in pages if WASTE * (memory(page) - least) <= least] or [min(pages, key=memory)]
    best = min(fitting, key=lambda page: (sum(groups(page).values()), memory(page)))
    return {key: best // elements[key] for key in classes}


def _kv_shape(layer: LayerSpec) -> _KvShape:
    attention = layer.attention
    if isinstance(attention, GroupedQueryAttention):
        return attention.shape.kv_heads, (attention.shape.head_dim, attention.shape.v_dim)
    assert isinstance(attention, LatentAttention)
    return 1, (attention.shape.cached,)


def _elements(shape: _KvShape) -> int:
    """Return the number of elements of one token in a layer with this KV."""
    heads, dims = shape
    return heads * sum(dims)
