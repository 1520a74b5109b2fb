"""Hunyuan with experts (Hunyuan-A13B): the attention of the dense models, and experts beside a shared one."""

from dataclasses import replace

from tandem.engine.config.model import ExpertRouter, LayerSpec, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.dense.hunyuan_v1_dense import hunyuan_layers, hunyuan_slots
from tandem.engine.models.families.family import Family, Json, make_model, parse_expert_count
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed
from tandem.protocol.errors import ModelError


def _parse(config: Json) -> ModelSpec:
    if config.get("use_cla"):
        raise ModelError("use_cla is not supported; every layer must have keys and values of its own.")
    chosen, width = config.get("moe_topk") or config["num_experts_per_tok"], int(config["intermediate_size"])
    count = int(config["num_hidden_layers"])
    top_ks = [int(number) for number in chosen] if isinstance(chosen, list) else [int(chosen)] * count
    if len(top_ks) != count:
        raise ModelError(f"moe_topk names {len(top_ks)} layers, num_hidden_layers is {count}.")
    experts = MixtureOfExperts(
        experts=parse_expert_count(config), top_k=top_ks[0], width=width, router=ExpertRouter(), shared_width=width
    )
    layers = [_with_top_k(layer, top_k) for layer, top_k in zip(hunyuan_layers(config, experts), top_ks, strict=True)]
    return make_model(config, "HunYuanMoEV1ForCausalLM", layers)


def _with_top_k(layer: LayerSpec, top_k: int) -> LayerSpec:
    assert isinstance(layer.feed_forward, MixtureOfExperts)
    return replace(layer, feed_forward=replace(layer.feed_forward, top_k=top_k))


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(
        hunyuan_slots(spec, parameters),
        {".mlp.gate.": ".mlp.gate.wg.", ".mlp.shared_experts.": ".mlp.shared_mlp."},
    )


FAMILY = Family(("HunYuanMoEV1ForCausalLM",), ("hunyuan_v1_moe",), _parse, _slots)
