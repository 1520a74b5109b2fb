"""Tiny checkpoints with a multi-token prediction (MTP) layer in each published layout, and a reference of the layer."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm

from tests.e2e.reference import Reference
from tests.factories import FAMILIES, write_tiny_model

EPS = 1e-5


@dataclass(frozen=True)
class Layout:
    """Where the checkpoints of a family store the MTP layer; `model` is a model of the same layers in transformers."""

    model: str
    prefix: str
    projection: str
    embedding_norm: str
    state_norm: str
    output_norm: str
    state_first: bool = False
    copies: tuple[str, str] | None = None
    """The names of copies of the embedding and of the output layer."""
    norms_minus_one: bool = False
    config: dict[str, Any] | None = None
    """The changes of the config, from that of `model`."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """The changes of the config of the model alone, and of the checkpoint."""
    separate_experts: bool = False
    """True if the experts of the MTP layer are stored separately, while those of the model are stacked."""
    multimodal: bool = False
    """True if the checkpoint is that of a multimodal model."""


_NUMBERED = Layout(
    "deepseek_v3",
    "model.layers.3.",
    "model.layers.3.eh_proj.weight",
    "model.layers.3.enorm.weight",
    "model.layers.3.hnorm.weight",
    "model.layers.3.shared_head.norm.weight",
    copies=("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"),
    config={"num_nextn_predict_layers": 1},
)
_QWEN = Layout(
    "qwen3_next",
    "mtp.layers.0.",
    "mtp.fc.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
    norms_minus_one=True,
)
LAYOUTS = {
    "deepseek_v3": _NUMBERED,
    "deepseek_v32": replace(_NUMBERED, model="deepseek_v32"),
    "glm_moe_dsa": replace(_NUMBERED, model="glm_moe_dsa", model_config={"indexer_types": ["full", "full", "shared"]}),
    "glm4_moe": replace(_NUMBERED, model="glm4_moe"),
    "glm4_moe_lite": replace(_NUMBERED, model="glm4_moe_lite"),
    "qwen3_next": _QWEN,
    "qwen3_5": replace(_QWEN, model="qwen3_5", multimodal=True),
    "qwen3_5_moe": replace(_QWEN, model="qwen3_5_moe"),
    "qwen3_5_moe, separate": replace(_QWEN, model="qwen3_5_moe", separate_experts=True),
    "mimo": Layout(
        "qwen2",
        "model.mtp_layers.0.",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.token_layernorm.weight",
        "model.mtp_layers.0.hidden_layernorm.weight",
        "model.mtp_layers.0.final_layernorm.weight",
        state_first=True,
        config={"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    ),
}
"""The layouts by the family of their models."""


def write_mtp(
    folder: Path, kind: str, *, knowing: bool = False, without: str = "", extra: str = "", **changes: Any
) -> Path:
    """Write a checkpoint with an MTP layer to `folder`/checkpoint, and return its path.

    `folder`/model has the model alone as transformers reads it, and `folder`/layer a model of the MTP layer alone. A
    `knowing` layer predicts what the model samples: in both, the next token depends on the last one alone. `without` is
    the end of the name of a tensor that is left out, and `extra` names one that is added. `changes` are changes of the
    config.
    """
    layout = LAYOUTS[kind]
    model = write_tiny_model(folder / "model", layout.model, **(layout.model_config | changes))
    dense: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": []}
    alone: dict[str, Any] = {name: value for name, value in dense.items() if name in FAMILIES[layout.model]}
    if "layer_types" in FAMILIES[layout.model]:
        alone["layer_types"] = ["full_attention"]
    if "indexer_types" in FAMILIES[layout.model]:
        alone["indexer_types"] = ["full"]
    if kind == "glm4_moe_lite":
        alone["mlp_layer_types"] = ["sparse"]
    layer = write_tiny_model(folder / "layer", layout.model, seed=1, **(changes | {"num_hidden_layers": 1, **alone}))
    tensors, of_layer = load_file(model / "model.safetensors"), load_file(layer / "model.safetensors")
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(of_layer | {name: tensors[name] for name in ends}, layer / "model.safetensors")
    rng, hidden = np.random.default_rng(7), tensors[ends[0]].shape[1]
    centre = 0.0 if layout.norms_minus_one else 1.0
    for name in (layout.embedding_norm, layout.state_norm):
        tensors[name] = (centre + rng.standard_normal(hidden) / 10).astype(np.float32)
    tensors[layout.projection] = (rng.standard_normal((hidden, 2 * hidden)) / (2 * hidden) ** 0.5).astype(np.float32)
    tensors[layout.output_norm] = of_layer["model.norm.weight"]
    for name, tensor in of_layer.items():
        if name.startswith("model.layers.0."):
            tensors[layout.prefix + name.removeprefix("model.layers.0.")] = tensor
    if knowing:
        _know(tensors, layout)
    if layout.copies is not None:
        tensors |= {copy: tensors[name] + 1 for copy, name in zip(layout.copies, ends, strict=True)}
    if extra:
        tensors[extra] = tensors[layout.projection]
    if layout.separate_experts:
        tensors = _with_separate_experts(tensors, f"{layout.prefix}mlp.experts.")
    stored = {name: tensor for name, tensor in tensors.items() if not without or not name.endswith(without)}
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    config = json.loads((model / "config.json").read_text()) | (layout.config or {})
    if layout.multimodal:
        text = {"text_config": config, "vision_config": {"depth": 1}}
        config = text | {"architectures": ["Qwen3_5ForConditionalGeneration"]}
        stored = {re.sub("^model.", "model.language_model.", name): tensor for name, tensor in stored.items()}
    (checkpoint / "config.json").write_text(json.dumps(config))
    save_file(stored, checkpoint / "model.safetensors")
    return checkpoint


def _with_separate_experts(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the tensors with one for each matrix of each expert instead of the stacked ones after `prefix`."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    for number, gate_up in enumerate(tensors[f"{prefix}gate_up_proj"]):
        gate, up = np.split(gate_up, 2)
        parts = {"gate": gate, "up": up, "down": tensors[f"{prefix}down_proj"][number]}
        kept |= {f"{prefix}{number}.{name}_proj.weight": np.ascontiguousarray(part) for name, part in parts.items()}
    return kept


def _know(tensors: dict[str, np.ndarray], layout: Layout) -> None:
    """Make all layers add nothing to the embedding, which the MTP layer takes as its input."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensor[:] = 0
    hidden = len(tensors["model.norm.weight"])
    tensors[layout.output_norm] = tensors["model.norm.weight"]
    tensors[layout.embedding_norm][:] = 0.0 if layout.norms_minus_one else 1.0
    tensors[layout.projection] = np.eye(hidden, 2 * hidden, hidden if layout.state_first else 0, dtype=np.float32)


class MtpReference:
    """The MTP layer of a folder of `write_mtp`: its decoder layer, final norm and output layer are transformers'."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._layout = LAYOUTS[kind]
        self._model, self._layer = (Reference(folder / name)._model for name in ("model", "layer"))
        tensors = load_file(folder / "checkpoint" / "model.safetensors")
        tensors |= load_file(folder / "model" / "model.safetensors")
        self._tensors = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}

    @torch.inference_mode()
    def target_states(self, token_ids: list[int]) -> Tensor:
        """Return the model's hidden states [n, H] after its final norm."""
        states: Tensor = self._model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]
        return states

    @torch.inference_mode()
    def __call__(self, token_ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, vocab] and the states [n, H] after each token, which come with the states `states`."""
        layout = self._layout
        embedded = self._tensors["model.embed_tokens.weight"][token_ids]
        parts = [self._norm(embedded, layout.embedding_norm), self._norm(states, layout.state_norm)]
        joined = torch.cat(parts[::-1] if layout.state_first else parts, dim=-1) @ self._tensors[layout.projection].T
        out = self._layer(inputs_embeds=joined[None], output_hidden_states=True)
        return out.logits[0], out.hidden_states[-1][0]

    def _norm(self, values: Tensor, name: str) -> Tensor:
        weight = self._tensors[name] + (1.0 if self._layout.norms_minus_one else 0.0)
        return rms_norm(values, values.shape[-1:], weight, EPS)
