"""The parts of the description of a GGUF architecture, and the reader of a file's metadata."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.protocol.errors import ModelError

Read = Callable[[str], Any]
"""A function that returns the value of a metadata key; None if the file does not have the key."""


class Metadata:
    """The metadata of a file, whose keys are given without the name of the architecture."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._kind = read("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the file does not have it."""
        value = self._read(f"{self._kind}.{key}")
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return the value of a key. Raises ModelError if the file does not have it."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"its metadata lacks {self._kind}.{key}; convert the model to GGUF again.")
        return value

    def largest(self, key: str) -> Any:
        """Return the value of a key, or of the layer with the largest one if there is a value for each layer."""
        value = self.get(key)
        return max(value) if isinstance(value, list) else value

    def given(self, **keys: str) -> dict[str, Any]:
        """Return the fields of config.json whose keys the file has."""
        return {name: value for name, key in keys.items() if (value := self.get(key)) is not None}

    @property
    def layers(self) -> int:
        """The number of layers without those of multi-token prediction, which come last and are not served."""
        return int(self.need("block_count")) - int(self.get("nextn_predict_layers", 0))


class Header(Metadata):
    """The metadata of a file, and the names of its tensors."""

    def __init__(self, read: Read, tensors: Collection[str]) -> None:
        super().__init__(read)
        self.tensors = tensors

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norms. Raises ModelError if the file does not have it."""
        epsilon = self.get("attention.layer_norm_epsilon")
        return float(self.need("attention.layer_norm_rms_epsilon") if epsilon is None else epsilon)

    def has(self, name: str) -> bool:
        """Return True if any layer has a tensor of this name."""
        return any(tensor.endswith(f".{name}") for tensor in self.tensors)

    def kv_heads(self) -> list[int]:
        """Return the number of KV heads of each layer, which is 0 in those without attention.

        Raises ModelError if the file does not have a number for each layer.
        """
        heads = self.need("attention.head_count_kv")
        if not isinstance(heads, list):
            raise ModelError(
                "attention.head_count_kv must have a value for each layer; convert the model to GGUF again."
            )
        return heads[: self.layers]


Fields = Callable[[Header], dict[str, Any]]
"""A function that returns fields of config.json."""


@dataclass(frozen=True, slots=True)
class Join:
    """One tensor of a checkpoint that is computed from one or more GGUF tensors of the same layer."""

    inputs: tuple[str, ...]
    """The names of the GGUF tensors without the prefix `blk.N.`."""
    name: str
    """The name of the result without the prefix and the number of the layer."""
    compute: Callable[..., Tensor]
    """The function of the tensors, which must also work on the device `meta`."""
    join_blocks: Callable[..., Tensor] | None = None
    """The same for the quantized blocks of the tensors, of which it only reorders rows; None = blocks are dequantized.

    If blocks are kept, the columns of the result are its inputs, also where `compute` transposes the tensors.
    """
    moved_columns: int = 0
    """The number of adjacent columns that stay together if columns are reordered, too.

    Blocks that are not whole in them are dequantized.
    """


def stacked_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Return the rows of the gate of each expert, then those of its up projection: [E, 2·I, any]."""
    return torch.cat((gate, up), dim=1)


def unchanged(weight: Tensor) -> Tensor:
    """Return the same weight."""
    return weight


STACKED_EXPERTS = (
    Join(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "mlp.experts.gate_up_proj", stacked_rows, stacked_rows),
    Join(("ffn_gate_up_exps.weight",), "mlp.experts.gate_up_proj", unchanged, unchanged),
    Join(("ffn_down_exps.weight",), "mlp.experts.down_proj", unchanged, unchanged),
)
"""The experts of a checkpoint that stores those of a layer in one tensor; files have gate and up in one or in two."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between the weights of a GGUF architecture and those of a Llama file."""

    model_type: str
    """The `model_type` of config.json."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in a layer that differ from `LAYER_NAMES`."""
    layers: str = "model.layers."
    """The prefix of the names of the tensors in layers."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Names outside of the layers that differ from Llama's."""
    permuted: bool = False
    """True if the converter stores the two rows of each RoPE pair of q and k next to each other."""
    norms_plus_one: bool = False
    """True if the converter adds 1 to the weights of norms."""
    rotated: bool = True
    """False if no layer has a position embedding, or if the family says which part of each head is rotated."""
    per_layer: bool = False
    """True if the number of KV heads or the inner size may differ from layer to layer.

    It is 0 in the layers that have no attention or no network.
    """
    joins: tuple[Join, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that the file's metadata may override."""


LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""The checkpoint's name of each tensor in a layer, with its suffix or for every suffix; `{}` is an expert's number."""
