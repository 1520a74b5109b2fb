"""LFM2 with experts in all layers but the first ones: sigmoid scores, and a bias used only to choose the experts."""

from tandem.engine.config.model import DenseFeedForward, ExpertRouter, FeedForward, MixtureOfExperts, ModelSpec
from tandem.engine.models.families.family import Family, Json, check_sizes, parse_expert_count
from tandem.engine.models.families.states.lfm2 import lfm2_model, lfm2_slots
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, renamed

_PREFIXES = {".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias", ".mlp.": ".feed_forward."}
_PRODUCTS = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
_DENSE_LAYERS = 2
"""The number of layers without experts if config.json does not have it, as in transformers."""


def _parse(config: Json) -> ModelSpec:
    layers, width = int(config["num_hidden_layers"]), int(config["intermediate_size"])
    check_sizes(intermediate_size=width)
    experts = MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        router=ExpertRouter(
            score="sigmoid",
            renormalize=bool(config.get("norm_topk_prob", True)),
            scaling=float(config.get("routed_scaling_factor") or 1.0),
            choice_bias=bool(config.get("use_expert_bias", True)),
        ),
    )
    dense = int(config.get("num_dense_layers", _DENSE_LAYERS))
    networks: list[FeedForward] = [DenseFeedForward(width) if n < dense else experts for n in range(layers)]
    return lfm2_model(config, "Lfm2MoeForCausalLM", networks)


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    return renamed(renamed(lfm2_slots(spec, parameters), _PREFIXES), _PRODUCTS)


FAMILY = Family(("Lfm2MoeForCausalLM",), ("lfm2_moe",), _parse, _slots)
