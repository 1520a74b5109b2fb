"""The interface of a model family, and parsers for the parts of config.json that most families share."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import (
    DenseFeedForward,
    ExpertRouter,
    FeedForward,
    GroupedQueryAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
    rope_of,
)
from tandem.engine.config.rope import RopeConfig, parse_rope, rotary_fraction
from tandem.engine.models.mtp_layout import MtpLayout
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.size_limits import MAX_CONTEXT, check_limit
from tandem.engine.models.slots import ParameterSlot, standard_slots
from tandem.protocol.errors import ModelError

Json = Mapping[str, Any]
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""Maps the name of an activation in config.json to its name in `DenseFeedForward`."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how to parse its config.json and where to store the tensors of its checkpoints.

    `parse` raises ModelError if something is not supported, and KeyError, TypeError or ValueError if the configuration
    is incomplete.
    """

    architectures: tuple[str, ...]
    """The names of the transformers classes in `architectures` of config.json."""
    model_types: tuple[str, ...]
    """The values of `model_type` in config.json, which is used if `architectures` is missing."""
    parse: Callable[[Json], ModelSpec]
    slots: Callable[[ModelSpec, Parameters], dict[str, ParameterSlot]] = standard_slots
    """Returns the destination of each tensor of a checkpoint, by the tensor's name."""
    mtp: MtpLayout | None = None
    """The layout of the family's multi-token prediction layer; None = it has none that is supported."""


def parse_activation(config: Json, default: str = "silu") -> str:
    """Return the activation function of the feed-forward networks. Raises ModelError if it is not supported."""
    named = config.get("hidden_act") or config.get("hidden_activation") or default
    if named not in ACTIVATIONS:
        raise ModelError(f"hidden_act {named!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[named]


def parse_dense(config: Json, *, bias: bool = False, activation: str = "silu") -> DenseFeedForward:
    """Return the feed-forward network of a layer without experts; `activation` is the default of the model family."""
    return DenseFeedForward(int(config["intermediate_size"]), parse_activation(config, activation), bias)


def parse_ungated(config: Json) -> DenseFeedForward:
    """Return a feed-forward network without a gate. Raises ModelError if its activation is not `relu2`."""
    named = config.get("hidden_act", "relu2")
    if named != "relu2":
        raise ModelError(f"hidden_act {named!r} is not supported without a gate; supported is relu2.")
    return DenseFeedForward(int(config["intermediate_size"]), named, bool(config.get("mlp_bias")), gated=False)


def with_dense(config: Json, layers: Sequence[LayerSpec], numbers: Container[int]) -> list[LayerSpec]:
    """Return `layers` with the experts replaced by a dense network in the layers whose numbers are in `numbers`."""
    dense = [number for number in range(len(layers)) if number in numbers]
    if not dense:
        return list(layers)
    feed_forward = parse_dense(config)
    return [
        replace(layer, feed_forward=feed_forward) if number in dense else layer for number, layer in enumerate(layers)
    ]


def parse_dense_layers(config: Json, first: int = 0) -> list[int]:
    """Return the numbers of the layers that have no experts.

    They are named by `mlp_layer_types`, or else are the first `first_k_dense_replace` layers, by default `first`.
    Raises ModelError if `mlp_layer_types` has another type or number of layers.
    """
    layers = int(config["num_hidden_layers"])
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return list(range(min(layers, int(config.get("first_k_dense_replace", first) or 0))))
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ModelError(f"mlp_layer_types must name {layers} layers, each dense or sparse.")
    return [number for number, kind in enumerate(kinds) if kind == "dense"]


def parse_sigmoid_router(config: Json) -> ExpertRouter:
    """Return the router of DeepSeek-V3 and GLM-4.5: sigmoid scores, and a bias used only to choose the experts."""
    return ExpertRouter(
        score="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        group_score="top_2_sum",
        choice_bias=True,
    )


def parse_expert_count(config: Json) -> int:
    """Return the number of experts. Raises KeyError if there is none.

    The field has different names in transformers 4 and 5.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((config[name] for name in names if config.get(name)), None) or config[names[0]])


def parse_shape(config: Json, *, head_dim: int | None = None, scale: float | None = None) -> AttentionShape:
    """Return the shape of attention without a window; `head_dim` is the family's default.

    If `scale` is None, scores are multiplied by 1 / √(head dimension).

    Raises ModelError if the number of KV heads does not divide the number of heads, or if the number of rotated
    dimensions is odd, below 1, or above the head dimension.
    """
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or head_dim or int(config["hidden_size"]) // heads)
    check_sizes(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads do not divide into {kv_heads} key/value heads.")
    rotary = int(dim * rotary_fraction(config))
    if rotary % 2 or not 0 < rotary <= dim:
        raise ModelError(f"{rotary} of {dim} dimensions are rotated; rotary embedding needs pairs of dimensions.")
    return AttentionShape(
        heads, kv_heads, dim, dim**-0.5 if scale is None else scale, rotary_dims=None if rotary == dim else rotary
    )


def check_sizes(**sizes: int) -> None:
    """Raise ModelError for the first size below 1; each argument is named by its field in config.json."""
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{name} {size} is not supported; it must be at least 1.")


def parse_window(config: Json) -> int | None:
    """Return `sliding_window`; None if it is not set. Raises ModelError if it is below 1."""
    window = config.get("sliding_window")
    if window is not None and int(window) < 1:
        raise ModelError(f"sliding_window {window} is not supported; a token sees at least itself.")
    return None if window is None else int(window)


def parse_softcap(config: Json, name: str, default: float | None = None) -> float | None:
    """Return the cap of scores or logits in the field `name`; None for null.

    Raises ModelError unless it is above 0.
    """
    cap = config.get(name, default)
    if cap is not None and not float(cap) > 0:
        raise ModelError(f"{name} {cap} is not supported; it must be above 0, or null for none.")
    return None if cap is None else float(cap)


def windows_by_type(config: Json, window: int | None, default: Callable[[int], str]) -> tuple[int | None, ...]:
    """Return each layer's sliding window, None for full attention.

    A layer's attention type is taken from `layer_types`; if that is missing, it is `default(number of the layer)`.
    """
    layers = int(config["num_hidden_layers"])
    kinds: Sequence[str] = config.get("layer_types") or [default(number) for number in range(layers)]
    if len(kinds) != layers:
        raise ModelError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}.")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(f"layer type {min(unknown)!r} is not supported; supported are full and sliding attention.")
    if "sliding_attention" in kinds and window is None:
        raise ModelError("layer_types names sliding attention, but sliding_window is not set.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def parse_eos(config: Json) -> tuple[int, ...]:
    """Return the ids of the end-of-sequence tokens."""
    token_ids = config.get("eos_token_id")
    if token_ids is None:
        return ()
    return tuple(int(token_id) for token_id in token_ids) if isinstance(token_ids, list) else (int(token_ids),)


def make_model(
    config: Json,
    architecture: str,
    layers: Sequence[LayerSpec],
    *,
    norm_eps: float | None = None,
    tied_by_default: bool = False,
    **changes: Any,
) -> ModelSpec:
    """Return a spec whose common fields are parsed from `config`; `changes` are further fields of `ModelSpec`.

    Raises ModelError for sizes below 1, and for experts that cannot be chosen or computed.
    """
    ropes = [rope for layer in layers if (rope := rope_of(layer.attention)) is not None]
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        layers=tuple(layers),
        norm_eps=float(config.get("rms_norm_eps") or 1e-6) if norm_eps is None else norm_eps,
        max_context=_max_context(config, ropes),
        tied_embeddings=bool(config.get("tie_word_embeddings", tied_by_default)),
        eos_token_ids=parse_eos(config),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        **changes,
    )
    check_sizes(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=len(spec.layers),
        max_position_embeddings=spec.max_context,
    )
    if not 0 <= spec.norm_eps < math.inf:
        raise ModelError(f"the epsilon {spec.norm_eps} of the norms is not supported; it must be a number from 0 on.")
    for experts in {layer.feed_forward for layer in layers}:
        if isinstance(experts, MixtureOfExperts):
            _check_experts(config, experts)
    return spec


def ropes_by_type(config: Json, full_theta: float, window_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of layers without a window and with one; the thetas are the family's defaults.

    They are named by attention type in `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` apply to
    the layers without a window (transformers 4).
    """
    named = config.get("rope_parameters") or {}
    if "full_attention" in named:
        full = {"rope_theta": full_theta} | dict(named["full_attention"] or {})
        local = {"rope_theta": window_theta} | dict(named.get("sliding_attention") or {})
        return parse_rope(config, full), parse_rope(config, local)
    full = {"rope_theta": config.get("rope_theta") or full_theta} | dict(config.get("rope_scaling") or {})
    return parse_rope(config, full), RopeConfig(theta=window_theta)


def with_window_rope(layer: LayerSpec, rope: RopeConfig) -> LayerSpec:
    """Return the layer; if it has a window, its rotary embedding is replaced by `rope`."""
    attention = layer.attention
    assert isinstance(attention, GroupedQueryAttention)
    return layer if attention.shape.window is None else replace(layer, attention=replace(attention, rope=rope))


def grouped_layers(
    config: Json,
    shape: AttentionShape,
    windows: Sequence[int | None],
    feed_forward: FeedForward,
    *,
    rope: RopeConfig | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: int = 0,
) -> list[LayerSpec]:
    """Return layers of grouped-query attention that differ only in their windows.

    `rope` is their rotary embedding; None = that of config.json.
    """
    rope = parse_rope(config) if rope is None else rope
    _check_longrope(rope, shape)
    return [
        LayerSpec(
            GroupedQueryAttention(
                replace(shape, window=window),
                rope,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm=qk_norm,
            ),
            feed_forward,
        )
        for window in windows
    ]


def with_output_norms(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the layers with norms of the outputs of attention and feed-forward network."""
    return [replace(layer, output_norms=True) for layer in layers]


def without_rope(layer: LayerSpec) -> LayerSpec:
    """Return a layer of grouped-query attention without position embedding."""
    assert isinstance(layer.attention, GroupedQueryAttention)
    return replace(layer, attention=replace(layer.attention, rope=None))


def rope_with_windows(layers: Sequence[LayerSpec], windows: Sequence[int | None]) -> list[LayerSpec]:
    """Return the layers, of which those without a window have no position embedding."""
    return [without_rope(layer) if window is None else layer for layer, window in zip(layers, windows, strict=True)]


def _check_longrope(rope: RopeConfig, shape: AttentionShape) -> None:
    pairs = shape.rotated // 2
    for factors in (rope.short_factors, rope.long_factors):
        if rope.kind == "longrope" and len(factors) != pairs:
            raise ModelError(f"config.json has {len(factors)} factors of longrope for {pairs} pairs of dimensions.")


def _max_context(config: Json, ropes: Sequence[RopeConfig]) -> int:
    """Return the maximum context length: the stated one or, if longer, the one to which YaRN extends it."""
    stated = int(config["max_position_embeddings"])
    stretched = (int(rope.original_context * rope.factor) for rope in ropes if rope.kind == "yarn")
    longest = max([stated, *stretched])
    check_limit("the context", longest if longest <= MAX_CONTEXT else math.inf, MAX_CONTEXT)
    return longest


def _check_experts(config: Json, moe: MixtureOfExperts) -> None:
    router = moe.router
    check_sizes(num_experts=moe.experts, moe_intermediate_size=moe.width)
    check_sizes(n_group=router.groups, topk_group=router.top_groups)
    if moe.experts % router.groups:
        raise ModelError(f"{moe.experts} experts do not divide into {router.groups} groups.")
    if router.top_groups > router.groups:
        raise ModelError(f"{router.top_groups} groups of experts cannot be chosen from {router.groups}.")
    group = moe.experts // router.groups
    if router.groups > 1 and router.group_score == "top_2_sum" and group < 2:
        raise ModelError(f"{moe.experts} experts in {router.groups} groups: a group's score is that of two experts.")
    reachable = group * router.top_groups
    if not 1 <= moe.top_k <= reachable:
        raise ModelError(f"{moe.top_k} experts a token cannot be chosen from {reachable}.")
    if moe.gated and moe.activation != "gelu_tanh" and parse_activation(config) != "silu":
        raise ModelError(f"hidden_act {config.get('hidden_act')!r} is not supported for experts; silu is.")
