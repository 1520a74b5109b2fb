"""DeepSeek-V3 and R1, and Kimi K2, which has the same architecture."""

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json, parse_sigmoid_router
from tandem.engine.models.families.latent.deepseek_v2 import latent_model, latent_slots
from tandem.engine.models.mtp_layout import NUMBERED_MTP


def _parse(config: Json) -> ModelSpec:
    return latent_model(config, "DeepseekV3ForCausalLM", parse_sigmoid_router(config))


FAMILY = Family(("DeepseekV3ForCausalLM",), ("deepseek_v3", "kimi_k2"), _parse, latent_slots, NUMBERED_MTP)
