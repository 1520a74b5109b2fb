"""A model's weights: one tensor per kind, stacked over layers, with q/k/v and gate/up stacked for the kernels."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Parameters:
    """L layers, H hidden size, I intermediate size; rows of q, k and v (gate and up) follow one another.

    Allocated once and written in place through `destinations`; this object owns the memory.
    """

    embedding: Tensor
    """[vocab, H]."""
    lm_head: Tensor
    """[vocab, H]; the very same tensor as `embedding` where the model ties them."""
    final_norm: Tensor
    """[H]."""
    input_norm: Tensor
    """[L, H]."""
    post_norm: Tensor
    """[L, H]."""
    qkv: Tensor
    """[L, (heads + 2·kv_heads)·head_dim, H]."""
    output: Tensor
    """[L, H, heads·head_dim]."""
    gate_up: Tensor
    """[L, 2·I, H]."""
    down: Tensor
    """[L, H, I]."""
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    q_norm: Tensor | None
    """[L, head_dim], as k_norm."""
    k_norm: Tensor | None


def allocate_parameters(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Allocates uninitialised weights on `device`; the `meta` device gives the shapes alone."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    layers, hidden, inner = config.layers, config.hidden_size, config.intermediate_size
    embedding = empty(config.vocab_size, hidden)
    return Parameters(
        embedding=embedding,
        lm_head=embedding if config.tied_embeddings else empty(config.vocab_size, hidden),
        final_norm=empty(hidden),
        input_norm=empty(layers, hidden),
        post_norm=empty(layers, hidden),
        qkv=empty(layers, config.qkv_size, hidden),
        output=empty(layers, hidden, config.heads * config.head_dim),
        gate_up=empty(layers, 2 * inner, hidden),
        down=empty(layers, hidden, inner),
        qkv_bias=empty(layers, config.qkv_size) if config.qkv_bias else None,
        output_bias=empty(layers, hidden) if config.output_bias else None,
        gate_up_bias=empty(layers, 2 * inner) if config.mlp_bias else None,
        down_bias=empty(layers, hidden) if config.mlp_bias else None,
        q_norm=empty(layers, config.head_dim) if config.qk_norm else None,
        k_norm=empty(layers, config.head_dim) if config.qk_norm else None,
    )


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes that `allocate_parameters` takes; tied embeddings are one tensor."""
    shapes = allocate_parameters(config, dtype, torch.device("meta"))
    tensors: set[Tensor | None] = {getattr(shapes, field.name) for field in fields(shapes)}
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def destinations(parameters: Parameters, config: ModelConfig) -> dict[str, Tensor]:
    """Maps the name of each tensor of a Hugging Face checkpoint to a view into `parameters` of the same shape."""
    found = {"model.embed_tokens.weight": parameters.embedding, "model.norm.weight": parameters.final_norm}
    if not config.tied_embeddings:
        found["lm_head.weight"] = parameters.lm_head
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        found |= {prefix + name: view for name, view in _layer_destinations(parameters, config, layer).items()}
    return found


def _layer_destinations(parameters: Parameters, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    heads, inner = [config.heads * config.head_dim] + [config.kv_heads * config.head_dim] * 2, config.intermediate_size
    stacked: dict[tuple[str, ...], tuple[Tensor | None, list[int]]] = {
        ("input_layernorm.weight",): (parameters.input_norm, [config.hidden_size]),
        ("post_attention_layernorm.weight",): (parameters.post_norm, [config.hidden_size]),
        _attention("q_proj.weight", "k_proj.weight", "v_proj.weight"): (parameters.qkv, heads),
        _attention("q_proj.bias", "k_proj.bias", "v_proj.bias"): (parameters.qkv_bias, heads),
        _attention("o_proj.weight"): (parameters.output, [config.hidden_size]),
        _attention("o_proj.bias"): (parameters.output_bias, [config.hidden_size]),
        _attention("q_norm.weight"): (parameters.q_norm, [config.head_dim]),
        _attention("k_norm.weight"): (parameters.k_norm, [config.head_dim]),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"): (parameters.gate_up, [inner, inner]),
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"): (parameters.gate_up_bias, [inner, inner]),
        ("mlp.down_proj.weight",): (parameters.down, [config.hidden_size]),
        ("mlp.down_proj.bias",): (parameters.down_bias, [config.hidden_size]),
    }
    found: dict[str, Tensor] = {}
    for names, (tensor, rows) in stacked.items():
        if tensor is not None:
            found |= dict(zip(names, tensor[layer].split_with_sizes(rows), strict=True))
    return found


def _attention(*names: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{name}" for name in names)
