"""An EAGLE-3 head in plain PyTorch, written from the paper (arXiv 2503.01840) and the published tensors."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from tests.e2e.reference import Reference
from tests.eagle_heads import DIM, HEADS, KV_HEADS

EPS = 1e-5


class Eagle3Reference:
    """The head of a folder of `write_eagle(third=True)`, for the model of another folder."""

    def __init__(self, folder: Path, model: Path, layers: tuple[int, ...], *, norm_before_residual: bool) -> None:
        """Load both; the states are taken before the `layers` of the model."""
        stored = load_file(folder / "model.safetensors")
        self._weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
        self._embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        self._model = Reference(model)._model
        self._layers, self._norm_before_residual = layers, norm_before_residual
        self._theta = json.loads((folder / "config.json").read_text()).get("rope_theta", 10000.0)

    @torch.inference_mode()
    def target_states(self, token_ids: list[int]) -> Tensor:
        """Return the model's hidden states before each of the layers, concatenated: [n, 3·H]."""
        states = self._model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in self._layers], dim=-1)

    def from_target(self, states: Tensor) -> Tensor:
        """Return the states [n, H] that tokens come with."""
        return states @ self._weights["fc.weight"].T

    def __call__(self, token_ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, vocab] and the states [n, H] after each token of a context, with the states `states`.

        Tokens that the head cannot predict have a logit of -inf.
        """
        embedded = self._norm(self._embedding[token_ids], "layers.0.input_layernorm")
        normed = self._norm(states, "layers.0.hidden_norm")
        hidden = normed if self._norm_before_residual else states
        hidden = hidden + self._attention(torch.cat((embedded, normed), dim=-1))
        inner = self._norm(hidden, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(inner, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        hidden = hidden + self._linear(silu(gate) * up, "layers.0.mlp.down_proj")
        logits = self._linear(self._norm(hidden, "norm"), "lm_head")
        if "d2t" in self._weights:
            offsets, every = self._weights["d2t"], logits.new_full((len(logits), len(self._embedding)), -torch.inf)
            every[:, torch.arange(len(offsets)) + offsets] = logits
            logits = every
        return logits, hidden

    def _attention(self, joined: Tensor) -> Tensor:
        q, k, v = (
            self._linear(joined, f"layers.0.self_attn.{name}_proj").unflatten(-1, (heads, DIM)).transpose(0, 1)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        out = scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True, enable_gqa=True)
        return self._linear(out.transpose(0, 1).flatten(1), "layers.0.self_attn.o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        """Return x [heads, n, DIM] after rotation of dimension i with dimension i + DIM / 2."""
        frequencies = self._theta ** (-torch.arange(0, DIM, 2) / DIM)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], EPS)
