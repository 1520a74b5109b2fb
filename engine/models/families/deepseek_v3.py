"""DeepSeek-V3 and R1, and Kimi K2, which has their form."""

from engine.config.model import ExpertRouter, ModelSpec
from engine.models.families.deepseek_v2 import latent_model, latent_places
from engine.models.families.family import Family, Json


def _parse(config: Json) -> ModelSpec:
    router = ExpertRouter(
        score="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        group_score="top_2_sum",
        choice_bias=True,
    )
    return latent_model(config, "DeepseekV3ForCausalLM", router)


FAMILY = Family(("DeepseekV3ForCausalLM",), ("deepseek_v3", "kimi_k2"), _parse, latent_places)
