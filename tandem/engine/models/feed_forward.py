"""The kinds of feed-forward networks that a layer may have, with weights prepared for the kernels."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config.model import DenseFeedForward, MixtureOfExperts
from tandem.engine.kernels.base import Kernels, Products
from tandem.engine.kernels.layers import DenseLayer, Experts, ExpertsLayer, InputNorm, LayerNorm, Linear, Norm
from tandem.engine.kernels.reference import activate
from tandem.engine.models.blocks import normed_linear
from tandem.engine.models.parameters import DenseParameters, ExpertNorms


class DenseBlock:
    """The dense feed-forward network of one layer."""

    def __init__(
        self, spec: DenseFeedForward, norm: InputNorm, weights: DenseParameters, *, kernels: Kernels, products: Products
    ) -> None:
        self.norm, self._kernels, self._products = norm, kernels, products
        self.input = products.prepare(Linear(weights.gate_up, weights.gate_up_bias))
        self.output = products.prepare(Linear(weights.down, weights.down_bias))
        self._activation = spec.activation
        self._layer: DenseLayer | None = None
        """The layer for fused kernels; None if the network has another norm than RMSNorm, or no gate."""
        if isinstance(norm, Norm) and spec.gated:
            self._layer = DenseLayer(norm, self.input, self.output, spec.activation)

    def add(self, hidden: Tensor, slots: Tensor, output_norm: Norm | None) -> None:
        """Add the network's output to `hidden` in place; if `output_norm` is given, the output is normalized first."""
        products = self._products
        if output_norm is not None:
            self._kernels.norm_add(self.compute(hidden), output_norm, hidden)
        elif self._layer is not None:
            products.feed_forward(hidden, self._layer)
        else:
            products.linear_add(self._active(hidden), self.output, hidden)

    def compute(self, hidden: Tensor) -> Tensor:
        """Return the network's output [T, H]."""
        return self._products.linear(self._active(hidden), self.output)

    def _active(self, hidden: Tensor) -> Tensor:
        """Return the network's inner elements [T, I], after the activation."""
        if (layer := self._layer) is not None:
            return self._products.norm_gate_up(hidden, layer.norm, layer.gate_up, layer.activation)
        return activate(normed_linear(self._products, hidden, self.norm, self.input), self._activation)


class ExpertsBlock:
    """The mixture of experts of one layer, whose shared expert, if it has one, has the same norm."""

    def __init__(
        self,
        spec: MixtureOfExperts,
        norm: Norm | LayerNorm,
        weights: Experts,
        *,
        kernels: Kernels,
        products: Products,
    ) -> None:
        """Prepare the weights for the kernels; `norm` has no bias."""
        self._products = products
        # LayerNorm without a bias is RMSNorm of the input minus its mean.
        self._centred = isinstance(norm, LayerNorm)
        self.layer = ExpertsLayer(Norm(norm.weight, norm.eps), kernels.prepare_experts(weights), spec)

    def add(self, hidden: Tensor, slots: Tensor, output_norm: Norm | None) -> None:
        """Add the output of the experts to `hidden` in place.

        Tokens whose slot is -1 are padding, for which no expert is computed.
        """
        assert output_norm is None
        self.add_to(hidden, hidden, slots)

    def add_to(self, out: Tensor, hidden: Tensor, slots: Tensor) -> None:
        """Add the output of the experts for `hidden` to `out` in place, which may be `hidden`."""
        source = hidden - hidden.mean(-1, keepdim=True) if self._centred else hidden
        self._products.experts(source, self.layer, slots, out)


class SeparateExpertsBlock:
    """The mixture of experts of one layer whose shared expert has norms of its own (`separate_norms`)."""

    def __init__(
        self,
        spec: MixtureOfExperts,
        norm: Norm,
        norms: ExpertNorms,
        weights: Experts,
        *,
        kernels: Kernels,
        products: Products,
    ) -> None:
        """Prepare the weights for the kernels; `norm` is that of the shared expert's input, `norms` are all others."""
        assert weights.shared_gate_up is not None
        assert weights.shared_down is not None
        shared = DenseParameters(weights.shared_gate_up.weight, None, weights.shared_down.weight, None)
        dense = DenseFeedForward(spec.shared_width, spec.shared_activation)
        self._shared = DenseBlock(dense, norm, shared, kernels=kernels, products=products)
        self._experts = ExpertsBlock(
            spec,
            Norm(norms.input_norm, norm.eps),
            replace(weights, shared_gate_up=None, shared_down=None),
            kernels=kernels,
            products=products,
        )
        self._norm, self._shared_norm = Norm(norms.output_norm, norm.eps), Norm(norms.shared_output_norm, norm.eps)
        self._kernels = kernels

    def add(self, hidden: Tensor, slots: Tensor, output_norm: Norm | None) -> None:
        """Add the norm of the sum of both outputs, which are normalized before, to `hidden` in place."""
        assert output_norm is not None
        experts, both = torch.zeros_like(hidden), torch.zeros_like(hidden)
        self._experts.add_to(experts, hidden, slots)
        self._kernels.norm_add(self._shared.compute(hidden), self._shared_norm, both)
        self._kernels.norm_add(experts, self._norm, both)
        self._kernels.norm_add(both, output_norm, hidden)


FeedForwardBlock = DenseBlock | ExpertsBlock | SeparateExpertsBlock
