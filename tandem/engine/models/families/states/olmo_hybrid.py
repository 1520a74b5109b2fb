"""OLMo Hybrid: Gated DeltaNet whose inputs are normalized, beside OLMo 2's attention whose outputs are."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.packed_weight import Weight
from tandem.engine.models.families.dense.olmo2 import olmo_layers
from tandem.engine.models.families.family import Family, Json, make_model, without_rope
from tandem.engine.models.families.states.qwen3_next import delta_layers, delta_weights, parse_delta_net
from tandem.engine.models.parameters import Parameters, StateParameters
from tandem.engine.models.slots import ParameterSlot, standard_slots, state_slots

_NORM_EPS = 1e-5
"""The epsilon of the output norm of Gated DeltaNet, which config.json does not have."""
_NAMES = {
    "convolution": "conv1d.weight",
    "decay_log": "A_log",
    "step_bias": "dt_bias",
    "state_norm": "o_norm.weight",
    "output": "o_proj.weight",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")


def _parse(given: Json) -> ModelSpec:
    config = dict(given)
    heads = int(config["num_attention_heads"])
    key_heads = int(config.get("linear_num_key_heads") or heads)
    key_dim = int(config.get("linear_key_head_dim") or 0.75 * int(config["hidden_size"]) / key_heads)
    delta = parse_delta_net(
        config
        | {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_dim,
        }
    )
    scale = 2.0 if config.get("linear_allow_neg_eigval", True) else 1.0
    (attention,) = olmo_layers(config, (None,))
    if (config.get("rope_parameters") or config).get("rope_theta") is None:
        attention = without_rope(attention)
    mixed = replace(
        attention,
        attention=replace(delta, norm_eps=_NORM_EPS, step_scale=scale),
        input_norms=True,
        output_norms=False,
    )
    layers = [mixed if is_delta else attention for is_delta in delta_layers(config)]
    return make_model(config, "OlmoHybridForCausalLM", layers)


def separate_convolutions(whole: ParameterSlot, weights: StateParameters) -> dict[str, ParameterSlot]:
    """Return the slots of the convolutions of q, k and v, which are stored separately; `whole` is that of all."""
    return {
        f"{name}_conv1d.weight": replace(whole, tensor=part, shape=(part.shape[0], 1, part.shape[1]), stacked=())
        for name, part in zip("qkv", weights.convolution.split_with_sizes(whole.stacked), strict=True)
    }


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = standard_slots(spec, parameters)
    for number, weights in enumerate(parameters.layers):
        outputs = {"attention": weights.attention_output_norm, "feedforward": weights.feed_forward_output_norm}
        slots |= {
            f"model.layers.{number}.post_{name}_layernorm.weight": ParameterSlot(norm)
            for name, norm in outputs.items()
            if norm is not None
        }
    for number, layer, delta in delta_weights(spec, parameters):
        prefix = f"model.layers.{number}.linear_attn."
        own = state_slots(layer, delta, _NAMES)
        own |= separate_convolutions(own.pop("conv1d.weight"), delta)
        rows: Sequence[Weight] = delta.projections.split_with_sizes(layer.projected)
        own |= {f"{name}.weight": ParameterSlot(part) for name, part in zip(_PROJECTIONS, rows, strict=True)}
        slots |= {prefix + name: slot for name, slot in own.items()}
    return slots


FAMILY = Family(("OlmoHybridForCausalLM",), ("olmo_hybrid",), _parse, _slots)
