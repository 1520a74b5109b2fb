"""The EAGLE head (arXiv 2401.15077) as a decoder with one layer.

The input at a position is `fc.weight` times two concatenated vectors: the embedding of the token, and the hidden state
that the token was sampled from. The output predicts the hidden state from which the next token will be sampled, by the
model's own projection. Hidden states are taken after the model's final norm, so the layer has no norm before it and
none after it.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import DeferredTokens, Kernels
from tandem.engine.kernels.layers import Linear
from tandem.engine.models.parameters import Parameters
from tandem.engine.speculation.eagle.folder import (
    BIAS,
    PRODUCT,
    TOKEN_OFFSETS,
    empty_layer,
    layer_slots,
    read_eagle,
)
from tandem.engine.speculation.heads.hidden_states import HiddenStateModel
from tandem.engine.speculation.heads.medusa import projection_rows
from tandem.engine.weights.tensor_reader import read_tensors
from tandem.protocol.errors import ModelError


class EagleModel(HiddenStateModel):
    """Runs steps like any model, except that each token comes with a hidden state, in `states`.

    See `HiddenStateModel`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        kernels: Kernels,
        *,
        product: Linear,
        token_map: Tensor | None,
        rows: int,
    ) -> None:
        """Prepare the weights for `kernels`, and allocate hidden states for up to `rows` rows.

        `product` computes the layer's input. The `lm_head` of `parameters` has one row for each token that can be
        predicted, and `token_map` has the ids of these tokens; None = the whole vocabulary.
        """
        # The hidden states are normalized already.
        layers = tuple(replace(layer, input_norm=None) for layer in parameters.layers)
        super().__init__(spec, replace(parameters, layers=layers), kernels, spec.max_context, rows)
        self.states = torch.zeros_like(self.drawn_hidden)
        """[rows, H]: the hidden states that the tokens of the next step were sampled from, in the order of the tokens.

        `EagleRunner` writes them before each step.
        """
        self._product = kernels.prepare(product)
        self._token_map = token_map

    def _embed(self, token_ids: Tensor, feed: DeferredTokens | None) -> Tensor:
        embedded = super()._embed(token_ids, feed)
        return self.kernels.linear(torch.cat((embedded, self.states[: len(embedded)]), dim=-1), self._product)

    def _logits(self, hidden: Tensor) -> Tensor:
        self._keep(hidden)
        spec = self.spec
        logits = self.kernels.linear(hidden, self._lm_head) * spec.logits_scale
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        if self._token_map is None:
            return logits
        # Tokens that the head cannot predict get a logit of -inf, so that they are never sampled.
        every = logits.new_full((len(logits), self.spec.vocab_size), -torch.inf)
        return every.index_copy_(1, self._token_map, logits)


def load_eagle(folder: Path, target: ModelSpec, parameters: Parameters, kernels: Kernels, rows: int) -> EagleModel:
    """Load the EAGLE head of a folder, in the target model's dtype and on its device.

    Raises ModelError, which says what does not fit. `parameters` are the target model's, `kernels` the head's own, and
    `rows` is the maximum number of tokens in a step of the head.
    """
    description = read_eagle(folder, target)
    device, hidden = parameters.embedding.device, target.hidden_size
    layer = empty_layer(description.spec, parameters.dtype, device)
    product = Linear(
        torch.empty(hidden, 2 * hidden, dtype=parameters.dtype, device=device),
        torch.empty(hidden, dtype=parameters.dtype, device=device) if BIAS in description.entries else None,
    )
    tensors = {name: slot.tensor for name, slot in layer_slots(description.spec, layer).items()}
    tensors |= {PRODUCT: product.weight} | ({} if product.bias is None else {BIAS: product.bias})
    token_map = None
    if description.vocabulary is not None:
        token_map = tensors[TOKEN_OFFSETS] = torch.empty(description.vocabulary, dtype=torch.int64, device=device)
    read_tensors(description.entries, {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)})
    if token_map is not None:
        token_map += torch.arange(len(token_map), device=device)
        if not 0 <= int(token_map.min()) <= int(token_map.max()) < target.vocab_size:
            raise ModelError(
                f"{folder}: {TOKEN_OFFSETS} names tokens outside of the vocabulary of {target.vocab_size}."
            )
    projection = parameters.lm_head if token_map is None else projection_rows(parameters, token_map)
    whole = replace(layer, embedding=parameters.embedding, lm_head=projection)
    return EagleModel(description.spec, whole, kernels, product=product, token_map=token_map, rows=rows)
