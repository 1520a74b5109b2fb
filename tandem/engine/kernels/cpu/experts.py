"""Mixtures of experts on CPUs: a loop over the chosen experts, with the matrix products of dense layers.

The choice of a token's experts is computed in float32, and does not depend on the other tokens. In a step of fewer than
LONG_TOKENS tokens every expert has fewer tokens than that, so every product has the same order of accumulation.
Operations that PyTorch computes run token by token, because PyTorch's result for an element depends on the element's
place in the tensor (the last elements are computed without vectors, with another approximation of exp), and PyTorch's
result of a product depends on the number of rows.
"""

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.model import MixtureOfExperts
from tandem.engine.kernels.layers import Experts, ExpertsLayer, Linear
from tandem.engine.kernels.reference import choose_experts, count_experts, scaled_weights


class Products(Protocol):
    """The matrix products that `add_experts` needs, of inputs that are already normed; `CpuKernels` has them."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Return x · weightᵀ + bias → [T, N]."""

    def gate_up(self, x: Tensor, gate_up: Linear, activation: str) -> Tensor:
        """Return activation(g) · u with [g | u] = x · gate_upᵀ + bias → [T, N / 2]; for `relu2` see `activate`."""


def with_wide_router(experts: Experts) -> Experts:
    """Return the experts with the router's weight and bias in float32. Called once, when the weights are loaded."""
    bias = experts.router_bias
    return replace(experts, router=experts.router.float(), router_bias=None if bias is None else bias.float())


def add_experts(products: Products, x: Tensor, routed: Tensor, out: Tensor, layer: ExpertsLayer, slots: Tensor) -> None:
    """Add the output of the experts for x = RMSNorm(hidden) to `out`; see `Kernels.experts`.

    `routed` is the input of the router: x, or hidden with the norm of the router. The router must be float32, see
    `with_wide_router`. The outputs of a token's experts are summed in float32, in the order of the experts' numbers.
    """
    experts, spec = layer.experts, layer.spec
    weights, chosen = _choose(_logits(routed, experts), experts, spec)
    weights = scaled_weights(weights, chosen, experts)
    inputs = x if experts.latent_down is None else products.linear(x, experts.latent_down)
    valid = slots >= 0
    count_experts(chosen[valid], experts)
    chosen = chosen.masked_fill(~valid.unsqueeze(1), -1)
    mixed = torch.zeros(inputs.shape, dtype=torch.float32)
    for expert in sorted(set(chosen[valid].flatten().tolist()).intersection(spec.local_experts)):
        tokens, ranks = torch.where(chosen == expert)
        index = expert - spec.local_experts.start
        gate_up = Linear(experts.gate_up[index], _row(experts.gate_up_bias, index))
        down = Linear(experts.down[index], _row(experts.down_bias, index))
        source, weight = inputs[tokens], weights[tokens, ranks, None]
        if spec.router.on_input:
            source, weight = source * weight.to(x.dtype), torch.ones_like(weight)
        output = products.linear(products.gate_up(source, gate_up, spec.activation), down)
        # An expert has a token at most once, so no element is added twice.
        mixed[tokens] += output.float() * weight
    if experts.latent_up is not None:
        mixed = products.linear(mixed.to(out.dtype), experts.latent_up).float()
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        inner = products.gate_up(x, experts.shared_gate_up, spec.shared_activation)
        shared = products.linear(inner, experts.shared_down).float()
        if experts.shared_gate is not None:
            gates = products.linear(x, Linear(experts.shared_gate)).float()
            shared *= torch.stack([torch.sigmoid(gate) for gate in gates])
        mixed += shared
    out += mixed.to(out.dtype)


def _logits(x: Tensor, experts: Experts) -> Tensor:
    """Return the router's logits [T, E] float32, token by token."""
    bias = experts.router_bias
    return torch.stack([F.linear(token, experts.router, bias) for token in x.float()])


def _choose(logits: Tensor, experts: Experts, spec: MixtureOfExperts) -> tuple[Tensor, Tensor]:
    """Compute `choose_experts` in such a way that a token's result does not depend on the other tokens.

    PyTorch computes softmax row by row anyway, so only sigmoid needs a loop over the tokens.
    """
    if spec.router.score != "sigmoid":
        return choose_experts(logits, experts.choice_bias, spec)
    choices = [choose_experts(token.unsqueeze(0), experts.choice_bias, spec) for token in logits]
    return torch.cat([weights for weights, _ in choices]), torch.cat([chosen for _, chosen in choices])


def _row(stacked: Tensor | None, index: int) -> Tensor | None:
    return None if stacked is None else stacked[index]
