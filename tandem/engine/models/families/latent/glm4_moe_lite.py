"""GLM-4.7-Flash: the latent attention and the router of DeepSeek-V3."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json, parse_sigmoid_router
from tandem.engine.models.families.latent.deepseek_v2 import latent_model, latent_slots
from tandem.engine.models.mtp_layout import NUMBERED_MTP

_DEFAULTS = {"q_lora_rank": 768, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    return latent_model(config, "Glm4MoeLiteForCausalLM", parse_sigmoid_router(config))


FAMILY = Family(("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",), _parse, latent_slots, NUMBERED_MTP)
