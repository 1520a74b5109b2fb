"""LFM2: most layers are gated short convolutions, and the others are attention with norms of queries and keys."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.engine.config.model import DenseFeedForward, FeedForward, ModelSpec
from tandem.engine.config.state_layers import ShortConvolution
from tandem.engine.models.families.family import Family, Json, check_sizes, grouped_layers, make_model, parse_shape
from tandem.engine.models.parameters import Parameters, StateParameters
from tandem.engine.models.slots import ParameterSlot, renamed, standard_slots, state_slots
from tandem.protocol.errors import ModelError

_NAMES = {
    "convolution": "conv.conv.weight",
    "convolution_bias": "conv.conv.bias",
    "output": "conv.out_proj.weight",
    "output_bias": "conv.out_proj.bias",
}
_RENAMED = {
    "model.norm.": "model.embedding_norm.",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}
_THETA = 1e6
"""The RoPE theta if config.json has none, as in transformers."""


def _width(config: Json) -> int:
    """Return the inner size of the feed-forward networks, which is rounded up to `block_multiple_of`."""
    width = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    multiple = int(config.get("block_multiple_of") or 256)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    width = 2 * width // 3
    if factor is not None:
        width = -(-int(float(factor) * width) // multiple) * multiple
    return width


def _kinds(config: Json) -> Sequence[str]:
    layers = int(config["num_hidden_layers"])
    full = config.get("full_attn_idxs")
    kinds: Sequence[str] = config.get("layer_types") or [
        "full_attention" if full is None or number in full else "conv" for number in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"full_attention", "conv"}:
        raise ModelError(f"layer_types must name {layers} layers, each full_attention or conv.")
    return kinds


def lfm2_model(given: Json, architecture: str, networks: Sequence[FeedForward]) -> ModelSpec:
    """Return the spec of a model with these feed-forward networks, one for each layer."""
    config = {"rope_theta": _THETA} | dict(given)
    shape, width = parse_shape(config), int(config.get("conv_L_cache") or 3)
    if width < 2:
        raise ModelError(f"conv_L_cache {width} is not supported; it must be at least 2.")
    (attention,) = grouped_layers(config, shape, (None,), networks[0], qk_norm=shape.head_dim)
    convolution = ShortConvolution(
        int(config["hidden_size"]), width, shape.kv_heads, bias=bool(config.get("conv_bias"))
    )
    if convolution.channels % convolution.blocks:
        raise ModelError(f"{convolution.channels} channels do not divide into {convolution.blocks} blocks.")
    mixers = {"full_attention": attention, "conv": replace(attention, attention=convolution)}
    return make_model(
        {"tie_word_embeddings": config.get("tie_embedding", True)} | config,
        architecture,
        [replace(mixers[kind], feed_forward=network) for kind, network in zip(_kinds(config), networks, strict=True)],
        norm_eps=float(config.get("norm_eps") or 1e-5),
    )


def _parse(config: Json) -> ModelSpec:
    inner = _width(config)
    check_sizes(intermediate_size=inner)
    return lfm2_model(config, "Lfm2ForCausalLM", [DenseFeedForward(inner)] * int(config["num_hidden_layers"]))


def lfm2_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of all tensors; those of experts have the names of Llama's checkpoints."""
    slots = renamed(standard_slots(spec, parameters), _RENAMED)
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        convolution, mixed = layer.attention, weights.attention
        if not isinstance(convolution, ShortConvolution) or not isinstance(mixed, StateParameters):
            continue
        prefix, rows = f"model.layers.{number}.", convolution.projected
        slots |= {prefix + name: slot for name, slot in state_slots(convolution, mixed, _NAMES).items()}
        slots[f"{prefix}conv.in_proj.weight"] = ParameterSlot(mixed.projections, stacked=rows)
        if mixed.projections_bias is not None:
            slots[f"{prefix}conv.in_proj.bias"] = ParameterSlot(mixed.projections_bias, stacked=rows)
    return slots


FAMILY = Family(("Lfm2ForCausalLM",), ("lfm2",), _parse, lfm2_slots)
