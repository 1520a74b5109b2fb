"""Granite 4: Granite's multipliers, Mamba-2 in most layers, and a dense network, with or without experts beside it."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.engine.config.model import DenseFeedForward, FeedForward, ModelSpec
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.dense.granite import granite_model
from tandem.engine.models.families.experts.granite_moe import granite_expert_slots, granite_experts
from tandem.engine.models.families.family import Family, Json, parse_activation, without_rope
from tandem.engine.models.families.states.bamba import mamba_layer_slots, parse_mamba
from tandem.engine.models.families.states.nemotron_h import OLD_LAYER_TYPES
from tandem.engine.models.parameters import DenseParameters, Parameters
from tandem.engine.models.slots import ParameterSlot, stacked_gate_up, standard_slots
from tandem.protocol.errors import ModelError


def _kinds(config: Json) -> Sequence[str]:
    layers = int(config["num_hidden_layers"])
    named = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"] * layers
    kinds = [OLD_LAYER_TYPES.get(kind, kind) for kind in named]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise ModelError(f"layer_types must name {layers} layers, each linear_attention or full_attention.")
    return kinds


def _feed_forward(config: Json) -> FeedForward:
    shared, experts = int(config["shared_intermediate_size"]), int(config.get("num_local_experts", 8) or 0)
    if not experts:
        return DenseFeedForward(shared, parse_activation(config))
    return granite_experts(config, experts, shared)


def _parse(config: Json) -> ModelSpec:
    spec = granite_model(config, "GraniteMoeHybridForCausalLM", _feed_forward(config))
    attention, kinds = spec.layers[0], _kinds(config)
    mixed = attention
    if "linear_attention" in kinds:
        mixed = replace(attention, attention=parse_mamba({"rms_norm_eps": 1e-6} | dict(config)))
    if config.get("position_embedding_type") != "rope":
        attention = without_rope(attention)
    return replace(spec, layers=tuple(mixed if kind == "linear_attention" else attention for kind in kinds))


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {name: slot for name, slot in standard_slots(spec, parameters).items() if ".mlp." not in name}
    for number, weights in enumerate(parameters.layers):
        prefix, network = f"model.layers.{number}.", weights.feed_forward
        if isinstance(network, Experts):
            assert network.shared_gate_up is not None
            assert network.shared_down is not None
            shared = DenseParameters(network.shared_gate_up.weight, None, network.shared_down.weight, None)
            slots |= granite_expert_slots(number, network)
        else:
            assert isinstance(network, DenseParameters)
            shared = network
        slots[f"{prefix}shared_mlp.input_linear.weight"] = stacked_gate_up(shared)
        slots[f"{prefix}shared_mlp.output_linear.weight"] = ParameterSlot(shared.down)
    return slots | mamba_layer_slots(spec, parameters)


FAMILY = Family(("GraniteMoeHybridForCausalLM",), ("granitemoehybrid",), _parse, _slots)
