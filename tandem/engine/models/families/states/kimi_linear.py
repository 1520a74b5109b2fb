"""Kimi-Linear: Kimi Delta Attention in most layers, and latent attention without position embedding in the others."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tandem.engine.config.model import Attention, LatentAttention, ModelSpec
from tandem.engine.config.state_layers import KimiDeltaAttention
from tandem.engine.kernels.packed_weight import Weight
from tandem.engine.models.families.family import Family, Json, check_sizes, parse_sigmoid_router
from tandem.engine.models.families.latent.deepseek_v2 import latent_model, latent_slots
from tandem.engine.models.families.states.olmo_hybrid import separate_convolutions
from tandem.engine.models.parameters import Parameters, StateParameters
from tandem.engine.models.slots import ParameterSlot, renamed, state_slots
from tandem.protocol.errors import ModelError

_DEFAULTS = {
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
}
"""The defaults of transformers for fields that config.json may leave out; nothing is rotated."""
_OTHER_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""The fields that published files name otherwise than those of DeepSeek-V3."""
_NAMES = {
    "convolution": "conv1d.weight",
    "decay_log": "A_log",
    "step_bias": "dt_bias",
    "state_norm": "o_norm.weight",
    "output": "o_proj.weight",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
_PRODUCTS = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def _kinds(config: Json, linear: Json) -> Sequence[str]:
    layers = int(config["num_hidden_layers"])
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds is None and "full_attn_layers" in linear:
        # The numbers are counted from 1.
        full = {int(number) - 1 for number in linear["full_attn_layers"]}
        kinds = ["full_attention" if number in full else "linear_attention" for number in range(layers)]
    if kinds is None:
        kinds = ["linear_attention" if number == 0 or number % 4 else "full_attention" for number in range(layers)]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise ModelError(f"layer_types must name {layers} layers, each linear_attention or full_attention.")
    return kinds


def _delta(config: Json, linear: Json) -> KimiDeltaAttention:
    dim = int(linear.get("head_dim") or config.get("linear_head_dim") or 128)
    delta = KimiDeltaAttention(
        heads=int(linear.get("num_heads") or config.get("linear_num_heads") or 32),
        head_dim=dim,
        rank=dim,
        width=int(linear.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim") or 4),
        norm_eps=float(config["rms_norm_eps"]),
    )
    check_sizes(linear_num_heads=delta.heads, linear_head_dim=dim)
    if delta.width < 2:
        raise ModelError(f"a convolution of width {delta.width} is not supported; it must be at least 2.")
    if config.get("mla_use_nope") is False:
        raise ModelError("mla_use_nope false is not supported: latent attention has no position embedding.")
    if config.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise ModelError(f"moe_router_activation_func {config['moe_router_activation_func']!r} is not supported.")
    return delta


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | {_OTHER_NAMES.get(name, name): value for name, value in given.items()}
    linear: Json = config.get("linear_attn_config") or {}
    spec = latent_model(config, "KimiLinearForCausalLM", parse_sigmoid_router(config))
    latent, delta = spec.layers[0].attention, _delta(config, linear)
    assert isinstance(latent, LatentAttention)
    mixers: dict[str, Attention] = {"full_attention": replace(latent, rope=None), "linear_attention": delta}
    kinds = _kinds(config, linear)
    layers = [replace(layer, attention=mixers[kind]) for layer, kind in zip(spec.layers, kinds, strict=True)]
    return replace(spec, layers=tuple(layers))


def _delta_slots(spec: KimiDeltaAttention, weights: StateParameters) -> dict[str, ParameterSlot]:
    slots = state_slots(spec, weights, _NAMES)
    slots |= separate_convolutions(slots.pop("conv1d.weight"), weights)
    slots["A_log"] = replace(slots["A_log"], transform=_flat, shape=(1, 1, spec.heads, 1))
    rows: Sequence[Weight] = weights.projections.split_with_sizes(spec.input_rows)
    parts = dict(zip(_PROJECTIONS, rows, strict=True))
    assert weights.decay_up is not None
    assert weights.gate_up is not None
    parts |= {"f_b_proj": weights.decay_up, "g_b_proj": weights.gate_up}
    return slots | {f"{name}.weight": ParameterSlot(part) for name, part in parts.items()}


def _flat(stored: Tensor) -> Tensor:
    return stored.flatten()


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    named = latent_slots(spec, parameters)
    experts = {name: slot for name, slot in named.items() if ".mlp.experts." in name}
    slots = renamed(
        {name: slot for name, slot in named.items() if name not in experts},
        {".mlp.gate.": ".block_sparse_moe.gate.", ".mlp.shared_experts.": ".block_sparse_moe.shared_experts."},
    )
    for old, new in _PRODUCTS.items():
        experts = renamed(experts, {old: new})
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        if isinstance(layer.attention, KimiDeltaAttention) and isinstance(weights.attention, StateParameters):
            delta, prefix = _delta_slots(layer.attention, weights.attention), f"model.layers.{number}.self_attn."
            slots |= {prefix + name: slot for name, slot in delta.items()}
    return slots | experts


FAMILY = Family(("KimiLinearForCausalLM",), ("kimi_linear",), _parse, _slots)
