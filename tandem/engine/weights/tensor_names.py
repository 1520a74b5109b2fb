"""Names the text model's tensors of a checkpoint, and those of the others that may be left out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.load_spec import text_part

_T = TypeVar("_T")
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
"""Pairs of prefixes of the text model's tensors: in multimodal checkpoints, and in those of text models."""
_ATTENTION_SCALES = tuple(f".{part}_{kind}" for part in ("q", "k", "v", "kv") for kind in ("scale", "zero_point"))
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names in one folder. Multimodal checkpoints prefix the text model's, and all others are the towers'."""

    spec: ModelSpec
    multimodal: bool
    predicting_layers: int
    """Layers after the model's that predict further tokens (DeepSeek-V3, GLM-4.5), which are not computed."""

    @classmethod
    def of(cls, spec: ModelSpec, config: Mapping[str, Any]) -> "TensorNames":
        """Returns the names of a folder with this specification and config.json."""
        text = text_part(config)
        return cls(spec, text is not config, int(text.get("num_nextn_predict_layers") or 0))

    def text_model(self, found: Mapping[str, _T]) -> dict[str, _T]:
        """Returns the tensors of the text model by the names that they have in a checkpoint of text alone."""
        if not self.multimodal:
            return dict(found)
        return {text: each for name, each in found.items() if (text := _text_name(name)) is not None}

    def is_harmless(self, name: str) -> bool:
        """Returns True for tensors that may be left out.

        They are RoPE's constants and copies of tied embeddings in old exports, the layers that predict further tokens,
        and the scales with which other servers quantize queries, keys and values.
        """
        if self.spec.quantization is not None and name.endswith(_ATTENTION_SCALES):
            return True
        if name.endswith("rotary_emb.inv_freq") or (self.spec.tied_embeddings and name == "lm_head.weight"):
            return True
        layer, own = _LAYER.match(name), len(self.spec.layers)
        return layer is not None and own <= int(layer[1]) < own + self.predicting_layers


def _text_name(name: str) -> str | None:
    """Returns the name in a checkpoint of text alone, None for a tensor of a tower."""
    for prefix, text in _PREFIXES:
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name if name == "lm_head.weight" else None
