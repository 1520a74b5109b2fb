"""A summary of a model for operators, in a few short lines."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tandem.engine.config.kv import kv_groups, state_of, window_of
from tandem.engine.config.model import GroupedQueryAttention, LatentAttention, MixtureOfExperts, ModelSpec
from tandem.engine.model_sizes import active_weights, kv_bytes_per_token, matrix_bytes, state_bytes, total_weights

_BYTES_OF_16_BITS = 2


def model_summary(
    spec: ModelSpec, item_bytes: int, kv_element_bytes: float | None = None, *, on_cpu: bool = False
) -> tuple[str, ...]:
    """Return a summary of the model: one line each about parameters, quantization, KV cache, attention and experts.

    `item_bytes` is the size of an element of unquantized weights, `kv_element_bytes` that of KV; None = the same.
    """
    kv_bytes = item_bytes if kv_element_bytes is None else kv_element_bytes
    total, active = total_weights(spec), active_weights(spec)
    experts = _experts(spec)
    parameters = f"{_count(total)} parameters" + (f", {_count(active)} active per token" if experts else "")
    cache, groups = f"{kv_bytes_per_token(spec, kv_bytes):,} bytes of KV per token", kv_groups(spec)
    if kv_bytes < _BYTES_OF_16_BITS:
        cache += " in 8 bits"
    if states := state_bytes(spec, item_bytes):
        cache += f", {states:,} bytes of states per request"
    if len(groups) > 1:
        depths = Counter(group.depth for group in groups)
        cache += f", pages of {' and '.join(f'{count} groups of {depth} layers' for depth, count in depths.items())}"
    weights = []
    if spec.quantization is not None:
        gib = matrix_bytes(spec, item_bytes, on_cpu=on_cpu) / (1 << 30)
        weights.append(f"weights: {spec.quantization.method}, {gib:.3g} GiB")
    return (parameters, *weights, cache, f"attention: {', '.join(_attention(spec))}", *experts)


def _attention(spec: ModelSpec) -> Iterator[str]:
    """Yield the parts of the line about attention.

    The first parts are the number of layers with each sliding window, and without one; then come state layers, sinks
    and latents.
    """
    windows = Counter(window_of(layer) for layer in spec.layers if state_of(layer) is None)
    for number, (window, layers) in enumerate(sorted(windows.items(), key=lambda item: item[0] or spec.max_context)):
        seen = "all" if window is None else f"{window:,}"
        yield f"{layers} {seen}" if number else f"{layers} layers see {seen} tokens"
    if states := sum(state_of(layer) is not None for layer in spec.layers):
        yield f"{states} with states"
    if any(isinstance(layer.attention, GroupedQueryAttention) and layer.attention.sinks for layer in spec.layers):
        yield "with sinks"
    latents = {layer.attention.shape.cached for layer in spec.layers if isinstance(layer.attention, LatentAttention)}
    if latents:
        yield f"latents of {max(latents)} values"


def _experts(spec: ModelSpec) -> Sequence[str]:
    """Return one line about each kind of expert layer, in the order of the layers."""
    kinds = Counter(layer.feed_forward for layer in spec.layers)
    lines = []
    for moe, layers in kinds.items():
        if isinstance(moe, MixtureOfExperts):
            shared = " and a shared one" if moe.shared_width else ""
            where = "" if layers == len(spec.layers) else f" in {layers} of {len(spec.layers)} layers"
            lines.append(f"{moe.experts} experts, {moe.top_k} per token{shared}{where}")
    return lines


def _count(elements: int) -> str:
    """Return a number of parameters with three significant digits: 30.5 B, 494 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if elements >= size:
            return f"{elements / size:.3g} {unit}"
    return f"{elements:,}"
