"""Mistral 4: latent attention whose queries are scaled by their position, and experts in one tensor a layer."""

from dataclasses import replace

from tandem.engine.config.model import ExpertRouter, LatentAttention, LayerSpec, ModelSpec, QueryScaling
from tandem.engine.kernels.layers import Experts
from tandem.engine.models.families.dense.ministral3 import parse_query_scaling
from tandem.engine.models.families.family import Family, Json
from tandem.engine.models.families.latent.deepseek_v2 import latent_model, latent_slots
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot

_ROPE = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The RoPE of a config.json that has none, as in transformers."""


def _parse(given: Json) -> ModelSpec:
    config = {"q_lora_rank": 1024} | dict(given)
    if not (given.get("rope_parameters") or given.get("rope_scaling")):
        config["rope_parameters"] = _ROPE
    router = ExpertRouter(
        renormalize=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        group_score="top_2_sum",
    )
    spec = latent_model(config, "Mistral4ForCausalLM", router)
    scaling = parse_query_scaling(config)
    return replace(spec, layers=tuple(_with_scaling(layer, scaling) for layer in spec.layers))


def _with_scaling(layer: LayerSpec, scaling: QueryScaling | None) -> LayerSpec:
    assert isinstance(layer.attention, LatentAttention)
    return replace(layer, attention=replace(layer.attention, query_scaling=scaling))


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    slots = {name: slot for name, slot in latent_slots(spec, parameters).items() if ".mlp.experts." not in name}
    for number, weights in enumerate(parameters.layers):
        if isinstance(weights.feed_forward, Experts):
            gate_up, rows = weights.feed_forward.gate_up, weights.feed_forward.gate_up.shape[1] // 2
            prefix = f"model.layers.{number}.mlp.experts."
            slots[f"{prefix}gate_up_proj"] = ParameterSlot(gate_up, stacked=(rows, rows))
            slots[f"{prefix}down_proj"] = ParameterSlot(weights.feed_forward.down)
    return slots


FAMILY = Family(("Mistral4ForCausalLM",), ("mistral4",), _parse, _slots)
