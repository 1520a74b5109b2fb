"""gpt-oss-20b and gpt-oss-120b, in MXFP4 or bfloat16: attention sinks, and experts with biases."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config.model import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    ExpertRouter,
    GroupedQueryAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.rope import parse_rope
from tandem.engine.kernels.layers import Experts
from tandem.engine.kernels.packed_weight import Weight
from tandem.engine.models.families.family import (
    Family,
    Json,
    grouped_layers,
    make_model,
    parse_expert_count,
    parse_shape,
    parse_window,
    windows_by_type,
)
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots
from tandem.protocol.errors import ModelError

_ROPE_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The RoPE scaling of the published models, which transformers uses if config.json has none."""


def _parse(config: Json) -> ModelSpec:
    computed = (SWIGLU_ALPHA, SWIGLU_LIMIT)
    if (float(config.get("swiglu_alpha", SWIGLU_ALPHA)), float(config.get("swiglu_limit", SWIGLU_LIMIT))) != computed:
        raise ModelError(
            f"swiglu_alpha and swiglu_limit other than {SWIGLU_ALPHA} and {SWIGLU_LIMIT} are not supported."
        )
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config.get("num_experts_per_tok") or config["experts_per_token"]),
        width=int(config["intermediate_size"]),
        router=ExpertRouter(score="softmax_of_top_k", bias=True),
        activation="clamped_swiglu",
        bias=True,
    )
    windows = windows_by_type(
        config,
        parse_window({"sliding_window": 128} | dict(config)),
        lambda number: "full_attention" if number % 2 else "sliding_attention",
    )
    biased = bool(config.get("attention_bias", True))
    shape = parse_shape(config, head_dim=64)
    scaled = config.get("rope_scaling") or config.get("rope_parameters")
    rope = parse_rope({"rope_theta": 150000.0} | dict(config), None if scaled else _ROPE_SCALING)
    layers = grouped_layers(config, shape, windows, experts, rope=rope, qkv_bias=biased, output_bias=biased)
    return make_model(config, "GptOssForCausalLM", [_with_sinks(layer) for layer in layers])


def _with_sinks(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.attention, GroupedQueryAttention)
    return replace(layer, attention=replace(layer.attention, sinks=True))


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {name: slot for name, slot in standard_slots(spec, parameters).items() if ".mlp." not in name}
    for number, weights in enumerate(parameters.layers):
        experts = weights.feed_forward
        assert isinstance(experts, Experts)
        assert experts.router_bias is not None
        assert experts.gate_up_bias is not None
        assert experts.down_bias is not None
        prefix = f"model.layers.{number}.mlp."
        slots |= {
            f"{prefix}router.weight": ParameterSlot(experts.router),
            f"{prefix}router.bias": ParameterSlot(experts.router_bias),
            f"{prefix}experts.gate_up_proj": _gate_up(spec, f"{prefix}experts.gate_up_proj", experts.gate_up),
            f"{prefix}experts.gate_up_proj_bias": ParameterSlot(experts.gate_up_bias, _split),
            f"{prefix}experts.down_proj": _down(spec, f"{prefix}experts.down_proj", experts.down),
            f"{prefix}experts.down_proj_bias": ParameterSlot(experts.down_bias, summed=True),
        }
    return slots


def _gate_up(spec: ModelSpec, name: str, weight: Weight) -> ParameterSlot:
    """Return the slot of the gate and up weights: [E, 2·I, H] if they are stored quantized, else [E, H, 2·I]."""
    if spec.quantization is not None and spec.quantization.stacks_experts(name):
        return ParameterSlot(weight, _split_rows)
    count, inner, hidden = weight.shape
    return ParameterSlot(weight, _split_columns, (count, hidden, inner))


def _down(spec: ModelSpec, name: str, weight: Weight) -> ParameterSlot:
    """Return the slot of the down weights: [E, H, I] if they are stored quantized, else [E, I, H]."""
    if spec.quantization is not None and spec.quantization.stacks_experts(name):
        return ParameterSlot(weight)
    count, hidden, width = weight.shape
    return ParameterSlot(weight, _transposed, (count, width, hidden))


def _split_rows(stored: Tensor) -> Tensor:
    """Return the gate rows, then the up rows, of a tensor [..., 2·I, any] whose rows alternate between them."""
    return torch.cat((stored[..., 0::2, :], stored[..., 1::2, :]), dim=-2)


def _split(stored: Tensor) -> Tensor:
    """Return [gate | up] from a tensor whose last dimension alternates between gate and up."""
    return torch.cat((stored[..., 0::2], stored[..., 1::2]), dim=-1)


def _split_columns(stored: Tensor) -> Tensor:
    """Return a tensor [E, 2·I, H] with the gate rows first, from a tensor [E, H, 2·I] with alternating columns."""
    return _split(stored).transpose(1, 2)


def _transposed(stored: Tensor) -> Tensor:
    return stored.transpose(1, 2)


FAMILY = Family(("GptOssForCausalLM",), ("gpt_oss",), _parse, _slots)
