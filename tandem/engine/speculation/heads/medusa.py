"""Medusa heads (arXiv 2401.10774) on hidden states of the model, computed by the model's kernels.

The input of all heads is the hidden state that a token was sampled from, after the model's final norm. Each layer of a
head computes x + SiLU(W·x + b), and a projection then gives the logits. Head h predicts the token h + 1 positions after
the sampled one: the token with the highest logit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import rms_norm
from tandem.engine.models.parameters import Parameters
from tandem.engine.speculation.heads.folder import TOKEN_MAP, HeadsFolder, layer_name, projection_name, read_heads
from tandem.engine.weights.tensor_reader import read_tensors
from tandem.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """The weights of one head, prepared for the kernels."""

    layers: Sequence[Linear]
    projection: Linear


class MedusaHeads:
    """All heads of a folder. Only the engine's thread uses them; they have no state of requests."""

    def __init__(
        self, heads: Sequence[MedusaHead], token_map: Tensor | None, norm: Tensor, eps: float, kernels: Kernels
    ) -> None:
        """Create the set of all `heads`, whose weights must be prepared for `kernels`.

        `token_map` [V'] int64 has the token id of each row of the projections; if it is None, the row number is the
        token id. `norm` and `eps` are the weights and the epsilon of the target model's final RMSNorm.
        """
        self._heads = heads
        self._token_map = token_map
        self._norm = norm
        self._eps = eps
        self._kernels = kernels

    def __len__(self) -> int:
        """Return the number of heads, which is the maximum number of draft tokens."""
        return len(self._heads)

    def guess(self, hidden: Tensor, drafts: int) -> Tensor:
        """Return the draft tokens [rows, drafts] int64 of the first heads, for unnormalized hidden states [rows, H]."""
        normed, tokens = rms_norm(hidden, self._norm, self._eps), []
        for head in self._heads[:drafts]:
            x = normed
            for layer in head.layers:
                x = x + silu(self._kernels.linear(x, layer))
            tokens.append(self._kernels.linear(x, head.projection).argmax(-1))
        guesses = torch.stack(tokens, dim=1)
        return guesses if self._token_map is None else self._token_map[guesses]


def load_medusa_heads(folder: Path, spec: ModelSpec, parameters: Parameters, kernels: Kernels) -> MedusaHeads:
    """Load the heads of a folder, in the model's dtype and on its device.

    Raises ModelError, which says what does not fit.
    """
    description = read_heads(folder, spec)
    tensors = _read(description, parameters)
    token_map = tensors.get(TOKEN_MAP)
    if token_map is not None and not 0 <= int(token_map.min()) <= int(token_map.max()) < spec.vocab_size:
        raise ModelError(f"{folder}: {TOKEN_MAP} names tokens outside of the vocabulary of {spec.vocab_size}.")
    shared = None if description.own_projection else kernels.prepare(Linear(_projection(folder, parameters, token_map)))
    heads = []
    for head in range(description.heads):
        names = [[layer_name(head, layer, part) for part in ("weight", "bias")] for layer in range(description.layers)]
        layers = [kernels.prepare(Linear(tensors[weight], tensors[bias])) for weight, bias in names]
        projection = shared or kernels.prepare(Linear(tensors[projection_name(head, description.layers)]))
        heads.append(MedusaHead(layers, projection))
    return MedusaHeads(heads, token_map, parameters.final_norm, spec.norm_eps, kernels)


def _read(description: HeadsFolder, parameters: Parameters) -> dict[str, Tensor]:
    device = parameters.embedding.device
    dtypes = {name: torch.int64 if name == TOKEN_MAP else parameters.dtype for name in description.entries}
    tensors = {
        name: torch.empty(entry.shape, dtype=dtypes[name], device=device) for name, entry in description.entries.items()
    }
    read_tensors(description.entries, tensors)
    return tensors


def projection_rows(parameters: Parameters, token_map: Tensor) -> Tensor:
    """Return the rows of the model's own projection for the tokens [n] that heads can predict."""
    weight = parameters.lm_head
    return (
        weight.rows(token_map).dequantized(parameters.dtype) if isinstance(weight, PackedWeight) else weight[token_map]
    )


def _projection(folder: Path, parameters: Parameters, token_map: Tensor | None) -> Tensor:
    if token_map is not None:
        return projection_rows(parameters, token_map)
    if isinstance(parameters.lm_head, PackedWeight):
        raise ModelError(f"{folder}: its heads use the model's projection, which is quantized; train others.")
    return parameters.lm_head
