"""MiMo: Qwen2 with a multi-token prediction layer."""

from dataclasses import replace

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.dense import qwen2
from tandem.engine.models.families.family import Family, Json
from tandem.engine.models.mtp_layout import MtpLayout

_LAYER = "model.mtp_layers.0."
_MTP = MtpLayout(
    prefix=_LAYER,
    projection=f"{_LAYER}input_proj.weight",
    embedding_norm=f"{_LAYER}token_layernorm.weight",
    state_norm=f"{_LAYER}hidden_layernorm.weight",
    output_norm=f"{_LAYER}final_layernorm.weight",
    state_first=True,
)


def _parse(config: Json) -> ModelSpec:
    return replace(qwen2.FAMILY.parse(config), architecture="MiMoForCausalLM")


FAMILY = Family(("MiMoForCausalLM",), ("mimo",), _parse, mtp=_MTP)
