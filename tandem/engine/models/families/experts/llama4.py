"""Llama 4, text only: most layers attend to chunks, the others have no position embedding and see all tokens."""

from dataclasses import replace

from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import (
    DenseFeedForward,
    ExpertRouter,
    FeedForward,
    GroupedQueryAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
    QueryScaling,
)
from tandem.engine.config.rope import RopeConfig, parse_rope
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.family import (
    Family,
    Json,
    check_sizes,
    make_model,
    parse_activation,
    parse_expert_count,
    parse_shape,
)
from tandem.engine.models.families.rows import paired_rope_slots
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed
from tandem.protocol.errors import ModelError

_DEFAULTS = {
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
    "interleave_moe_layer_step": 1,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 16384,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
"""The defaults of transformers for fields that config.json may leave out."""
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_NAMES = {
    "mlp.gate.weight": "feed_forward.router.weight",
    "mlp.shared_experts.": "feed_forward.shared_expert.",
    "mlp.": "feed_forward.",
}
"""The parts of tensor names that differ from Llama's."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    layers, every = int(config["num_hidden_layers"]), int(config["no_rope_layer_interval"])
    step = int(config["interleave_moe_layer_step"])
    check_sizes(no_rope_layer_interval=every, interleave_moe_layer_step=step, floor_scale=int(config["floor_scale"]))
    rotated = config.get("no_rope_layers") or [(number + 1) % every != 0 for number in range(layers)]
    kinds = config.get("layer_types") or [_CHUNKED if is_rotated else _FULL for is_rotated in rotated]
    if len(kinds) != layers or len(rotated) < layers:
        raise ModelError(f"layer_types and no_rope_layers must name {layers} layers, as num_hidden_layers does.")
    if unknown := set(kinds) - {_CHUNKED, _FULL}:
        raise ModelError(f"layer type {min(unknown)!r} is not supported; supported are {_CHUNKED} and {_FULL}.")
    shape, rope = parse_shape(config, head_dim=128), parse_rope(config)
    sparse = config.get("moe_layers")
    sparse = set(range(step - 1, layers, step) if sparse is None else sparse)
    networks = [_experts(config) if number in sparse else _dense(config) for number in range(layers)]
    return make_model(
        config,
        "Llama4ForCausalLM",
        [
            LayerSpec(_attention(config, _masked(config, shape, kind), rope if is_rotated else None), network)
            for kind, is_rotated, network in zip(kinds, rotated[:layers], networks, strict=True)
        ],
    )


def _masked(config: Json, shape: AttentionShape, kind: str) -> AttentionShape:
    """Return the shape of a layer of this type. Raises ModelError if chunks have no token."""
    chunk = config["attention_chunk_size"]
    if kind == _FULL or chunk is None:
        return shape
    check_sizes(attention_chunk_size=int(chunk))
    return replace(shape, chunk=int(chunk))


def _attention(config: Json, shape: AttentionShape, rope: RopeConfig | None) -> GroupedQueryAttention:
    """Return the attention of a layer; layers without position embedding scale their queries instead of norming."""
    tuned = rope is None and config.get("attn_temperature_tuning", True)
    biased = bool(config.get("attention_bias"))
    return GroupedQueryAttention(
        shape,
        rope,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=shape.head_dim if rope is not None and config.get("use_qk_norm", True) else 0,
        qk_norm_weights=False,
        query_scaling=QueryScaling(float(config["attn_scale"]), int(config["floor_scale"]), 1) if tuned else None,
    )


def _dense(config: Json) -> FeedForward:
    return DenseFeedForward(int(config["intermediate_size_mlp"]), parse_activation(config))


def _experts(config: Json) -> FeedForward:
    width = int(config["intermediate_size"])
    return MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=width,
        router=ExpertRouter(score="sigmoid", renormalize=False, on_input=True),
        shared_width=width,
    )


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots; the checkpoint stacks the experts of a layer.

    It has the columns of their weights as rows, except of codes in GGUF files.
    """
    slots = paired_rope_slots(spec, parameters)
    slots = renamed({name: slot for name, slot in slots.items() if ".mlp.experts." not in name}, _NAMES)
    for number, weights in enumerate(parameters.layers):
        experts = weights.feed_forward
        if not isinstance(experts, Experts):
            continue
        prefix = f"model.layers.{number}.feed_forward.experts."
        for name, weight, stacked in (("gate_up_proj", experts.gate_up, 2), ("down_proj", experts.down, 1)):
            count, rows, columns = weight.shape
            parts = (rows // stacked,) * stacked if stacked > 1 else ()
            slot = ParameterSlot(weight, _transposed, (count, columns, rows), stacked=parts)
            if spec.quantization is not None and spec.quantization.stacks_experts(prefix + name):
                slot = ParameterSlot(weight, stacked=parts)
            slots[prefix + name] = slot
    return slots


def _transposed(stored: Tensor) -> Tensor:
    return stored.transpose(1, 2)


FAMILY = Family(("Llama4ForCausalLM",), ("llama4_text",), _parse, _slots)
