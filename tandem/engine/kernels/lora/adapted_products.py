"""The products of a model with adapters: the base model's products, plus LoRA updates for tokens with an adapter."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from tandem.engine.kernels.base import Products
from tandem.engine.kernels.layers import DenseLayer, ExpertsLayer, Linear, Norm
from tandem.engine.kernels.lora_tables import LoraTables


class LoraUpdate(Protocol):
    """The LoRA update of one product in one step. Holds A · x of the step's tokens, each with the A of its adapter."""

    def add_to(self, out: Tensor) -> None:
        """Add B · (A · x) to the product `out` [T, N] in place."""

    def activated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return activation(g) · u with [g | u] = gate_up [T, 2·I] + B · (A · x) → [T, I]; may overwrite gate_up."""


class LoraUpdates(ABC):
    """Computes the LoRA updates of a step's products.

    Each thread that runs steps has its own state of the current step.
    """

    @property
    def trial_tokens(self) -> tuple[int, ...]:
        """Numbers of tokens of additional trial prefill steps, to compile kernels that no other trial step needs."""
        return ()

    @abstractmethod
    def begin_step(self, numbers: Tensor | None) -> None:
        """Begin a step; `numbers` [T] int32 has the adapter of each token, counted from 1; 0 = no adapter.

        `numbers` None = no token has an adapter.
        """

    @abstractmethod
    def keep_tokens(self, kept: Tensor) -> None:
        """Restrict the step to the tokens with the indices `kept` [D] int64: later products get only these tokens."""

    @abstractmethod
    def start(self, x: Tensor, norm: Norm | None, tables: LoraTables) -> LoraUpdate | None:
        """Compute A · RMSNorm(x), or A · x if there is no `norm`. Returns None if no token has an adapter."""


class AdaptedProducts(Products):
    """The products of `base` plus the LoRA updates of the adapters of the step's tokens.

    Products whose weights have no tables are those of `base`.
    """

    def __init__(self, base: Products, updates: LoraUpdates, tables: Mapping[int, LoraTables]) -> None:
        """Wrap `base`; `tables` maps the `id` of each adapted weight, before `prepare`, to its LoRA tables."""
        self._base, self.updates, self._tables = base, updates, tables

    def prepare(self, linear: Linear) -> Linear:
        """Prepare the weight with `base`, and attach the weight's LoRA tables."""
        return replace(self._base.prepare(linear), adapters=self._tables.get(id(linear.weight)))

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: Linear) -> Tensor:
        """Compute the product, and add the LoRA update."""
        update = self._start(hidden, norm, linear)
        out = self._base.norm_linear(hidden, norm, linear)
        if update is not None:
            update.add_to(out)
        return out

    def norm_gate_up(self, hidden: Tensor, norm: Norm | None, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Compute the product, add the LoRA update, and apply the activation."""
        update = self._start(hidden, norm, gate_up)
        if update is None:
            return self._base.norm_gate_up(hidden, norm, gate_up, activation)
        return update.activated(self._base.norm_linear(hidden, norm, gate_up), activation)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Compute the product, and add the LoRA update."""
        update = self._start(x, None, linear)
        out = self._base.linear(x, linear)
        if update is not None:
            update.add_to(out)
        return out

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Add the product and the LoRA update to `hidden`."""
        update = self._start(x, None, linear)
        self._base.linear_add(x, linear, hidden)
        if update is not None:
            update.add_to(hidden)

    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor, out: Tensor) -> None:
        """Compute the experts, which adapters do not change."""
        self._base.experts(hidden, layer, slots, out)

    def feed_forward(self, hidden: Tensor, layer: DenseLayer) -> None:
        """Compute the network as `base` does, or, if adapters change it, as two products one after the other."""
        if layer.gate_up.adapters is None and layer.down.adapters is None:
            self._base.feed_forward(hidden, layer)
        else:
            super().feed_forward(hidden, layer)

    def norms_apart(self, hidden: Tensor, linear: Linear) -> bool:
        """Answer for the base product; the kernels of the updates compute the norm themselves."""
        return self._base.norms_apart(hidden, linear)

    def _start(self, x: Tensor, norm: Norm | None, linear: Linear) -> LoraUpdate | None:
        return None if linear.adapters is None else self.updates.start(x, norm, linear.adapters)
