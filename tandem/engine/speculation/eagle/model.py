"""Heads as decoders with one layer: EAGLE-1, EAGLE-3, and the multi-token prediction (MTP) layers of checkpoints.

Each token of a step comes with a hidden state: at first that of the target model from which the token was sampled, then
the head's own. The head predicts the token after it.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import DeferredTokens, Kernels, StepLayout
from tandem.engine.kernels.kv_cache import GroupCache
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.reference import rms_norm
from tandem.engine.models.blocks import Queries
from tandem.engine.models.layers import DecoderLayer
from tandem.engine.models.parameters import Parameters
from tandem.engine.speculation.heads.hidden_states import HiddenStateModel


class HeadModel(HiddenStateModel):
    """Runs steps like any model, except that each token comes with a hidden state, in `states`.

    Its `drawn_hidden` are the states that the tokens sampled by the head come with in its next step.
    """

    def __init__(
        self, spec: ModelSpec, parameters: Parameters, kernels: Kernels, rows: int, *, token_map: Tensor | None = None
    ) -> None:
        """Prepare the weights for `kernels`, and allocate hidden states for up to `rows` rows.

        The `lm_head` of `parameters` has one row for each token that can be predicted, and `token_map` has the ids of
        these tokens; None = the whole vocabulary.
        """
        super().__init__(spec, parameters, kernels, spec.max_context, rows)
        self.states = torch.zeros_like(self.drawn_hidden)
        """[rows, H]: the hidden states of the tokens of the next step, in the order of the tokens.

        `EagleRunner` writes them before each step.
        """
        self._token_map = token_map

    @abstractmethod
    def from_target(self, drawn: Tensor) -> Tensor:
        """Return the hidden states [n, H] that tokens come with, from `drawn_hidden` [n, any] of the target model."""

    @abstractmethod
    def _output(self, hidden: Tensor) -> Tensor:
        """Keep the states of the sampled tokens, and return the input of the output layer; both are [rows, H]."""

    def _logits(self, hidden: Tensor) -> Tensor:
        spec = self.spec
        logits = self.kernels.linear(self._output(hidden), self._lm_head) * spec.logits_scale
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        if self._token_map is None:
            return logits
        # Tokens that the head cannot predict get a logit of -inf, so that they are never sampled.
        every = logits.new_full((len(logits), self.spec.vocab_size), -torch.inf)
        return every.index_copy_(1, self._token_map, logits)


@dataclass(frozen=True, slots=True)
class JoinedInput:
    """The input of a head's layer: a product of the token's embedding and its hidden state, concatenated."""

    product: Linear
    embedding_norm: Norm | None = None
    state_norm: Norm | None = None
    state_first: bool = False
    """True if the hidden state comes before the embedding."""


class EagleModel(HeadModel):
    """An EAGLE-1 head (arXiv 2401.15077), or an MTP layer (arXiv 2412.19437).

    The hidden states are taken after the norm before the output layer, both those of the target model and the head's
    own. vLLM (`DeepSeekMTP`, `Glm4MoeMTP`, `Qwen3NextMTP`, `Qwen3_5MTP`, `MiMoMTP`) and SGLang (`deepseek_nextn.py`,
    `qwen3_next_mtp.py`) also give the layer the target's state after that norm. The layer's own state of DeepSeek-V3
    and GLM is the normalized one in SGLang and the one before `shared_head.norm` in vLLM; that of the others is the
    normalized one in both. EAGLE-1 has no norms: the layer's output predicts the target's normalized state.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        kernels: Kernels,
        rows: int,
        *,
        joined: JoinedInput,
        target_norm: Norm,
        output_norm: Norm | None,
        token_map: Tensor | None = None,
    ) -> None:
        """Prepare the weights as `HeadModel` does.

        `target_norm` is the final norm of the target model; `output_norm` is that of the head, or None.
        """
        super().__init__(spec, parameters, kernels, rows, token_map=token_map)
        self._joined = replace(joined, product=kernels.prepare(joined.product))
        self._target_norm, self._output_norm = target_norm, output_norm

    def from_target(self, drawn: Tensor) -> Tensor:
        """Return the hidden states after the target's final norm."""
        return _normed(drawn, self._target_norm)

    def _embed(self, token_ids: Tensor, feed: DeferredTokens | None) -> Tensor:
        joined, embedded = self._joined, super()._embed(token_ids, feed)
        states = _normed(self.states[: len(embedded)], joined.state_norm)
        embedded = _normed(embedded, joined.embedding_norm)
        parts = (states, embedded) if joined.state_first else (embedded, states)
        return self.kernels.linear(torch.cat(parts, dim=-1), joined.product)

    def _output(self, hidden: Tensor) -> Tensor:
        normed = _normed(hidden, self._output_norm)
        self._keep(normed)
        return normed


class Eagle3Model(HeadModel):
    """An EAGLE-3 head (arXiv 2503.01840).

    The state of a token is a product of the target's hidden states before several layers. Attention reads the embedding
    and the state, normalized and concatenated, while the residual stream begins with the state alone. The head's own
    states are its residual stream before the norm.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        kernels: Kernels,
        rows: int,
        *,
        product: Linear,
        embedding_norm: Norm,
        state_norm: Norm,
        norm_before_residual: bool,
        token_map: Tensor | None = None,
    ) -> None:
        """Prepare the weights as `HeadModel` does.

        `product` computes a state [H] from the target's hidden states. With `norm_before_residual`, the residual stream
        begins with the normalized state.
        """
        super().__init__(spec, parameters, kernels, rows, token_map=token_map)
        self._product = kernels.prepare(product)
        self._embedding_norm, self._state_norm = embedding_norm, state_norm
        self._output_norm = Norm(parameters.final_norm, spec.norm_eps)
        self._norm_before_residual = norm_before_residual
        self._attention_input = torch.empty(0)
        """[T, 2·H]: the embeddings and states of the step's tokens."""

    def from_target(self, drawn: Tensor) -> Tensor:
        """Return the states that `fc` computes from the target's hidden states before several layers."""
        return self.kernels.linear(drawn, self._product)

    def _embed(self, token_ids: Tensor, feed: DeferredTokens | None) -> Tensor:
        embedded = super()._embed(token_ids, feed)
        states = self.states[: len(embedded)]
        normed = _normed(states, self._state_norm)
        self._attention_input = torch.cat((_normed(embedded, self._embedding_norm), normed), dim=-1)
        # A copy: the layer adds to the residual stream in place.
        return normed if self._norm_before_residual else states.clone()

    def _store(self, layer: DecoderLayer, hidden: Tensor, layout: StepLayout, cache: GroupCache) -> Queries:
        return layer.attention.store(self._attention_input, layout, cache)

    def _output(self, hidden: Tensor) -> Tensor:
        self._keep(hidden)
        return _normed(hidden, self._output_norm)


def _normed(hidden: Tensor, norm: Norm | None) -> Tensor:
    return hidden if norm is None else rms_norm(hidden, norm.weight, norm.eps)
