"""The products of a model with adapters: those of other kernels, and an update of low rank for some tokens."""

import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.kernels.base import Kernels, Linear, StepLayout
from tandem.engine.kernels.kv_cache import KvCache
from tandem.engine.kernels.lora.tables import AdaptedLinear, LoraTables
from tandem.engine.kernels.reference import ReferenceKernels, activate, rms_norm


class LoraUpdate(Protocol):
    """A · x of a step's tokens, each with its adapter."""

    def add_to(self, out: Tensor) -> None:
        """Adds B · (A · x) to the product `out` [T, N] in place."""

    def activated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Returns activation(g) · u of [g | u] = gate_up [T, 2·I] + B · (A · x), which may be overwritten → [T, I]."""


class LoraProducts(Kernels):
    """A base of kernels, before the class that computes the products, which adds what the step's adapters change.

    `StepLayout.adapters` has each token's adapter. Products of weights without tables stay as they are.
    """

    tables: Mapping[int, LoraTables] = {}
    """The tables of each adapted weight by its `id`, set before the weights are prepared."""

    def prepare(self, linear: Linear) -> Linear:
        """Has the weight prepared, and adds its tables."""
        tables, base = self.tables.get(id(linear.weight)), super().prepare(linear)
        return base if tables is None else AdaptedLinear(base.weight, base.bias, base=base, tables=tables)

    def begin_step(self, cache: KvCache, layout: StepLayout) -> None:
        """Notes the adapters of the step's tokens."""
        super().begin_step(cache, layout)
        self.note_adapters(layout.adapters)

    @abstractmethod
    def note_adapters(self, numbers: Tensor | None) -> None:
        """Is called with the adapter of each token [T] int32 from 1, 0 = none, for the products that follow."""

    @abstractmethod
    def update(self, x: Tensor, norm: Tensor | None, eps: float, tables: LoraTables) -> LoraUpdate | None:
        """Computes A · RMSNorm(x), without `norm` A · x; None if no token has an adapter."""

    def norm_linear(self, hidden: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        """Computes the product and adds the update."""
        linear, update = self._begin(hidden, norm, eps, linear)
        out = super().norm_linear(hidden, norm, eps, linear)  # type: ignore[safe-super]
        if update is not None:
            update.add_to(out)
        return out

    def norm_gate_up(
        self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Linear, activation: str = "silu"
    ) -> Tensor:
        """Computes the product, adds the update, and applies the activation."""
        gate_up, update = self._begin(hidden, norm, eps, gate_up)
        if update is None:
            return super().norm_gate_up(hidden, norm, eps, gate_up, activation)  # type: ignore[safe-super]
        return update.activated(super().norm_linear(hidden, norm, eps, gate_up), activation)  # type: ignore[safe-super]

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Computes the product and adds the update."""
        linear, update = self._begin(x, None, 0.0, linear)
        out = super().linear(x, linear)  # type: ignore[safe-super]
        if update is not None:
            update.add_to(out)
        return out

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Adds the product and the update to `hidden`."""
        linear, update = self._begin(x, None, 0.0, linear)
        super().linear_add(x, linear, hidden)  # type: ignore[safe-super]
        if update is not None:
            update.add_to(hidden)

    def feed_forward(
        self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Linear, down: Linear, activation: str = "silu"
    ) -> None:
        """Computes both products one after the other if adapters change one of them."""
        if isinstance(gate_up, AdaptedLinear) or isinstance(down, AdaptedLinear):
            Kernels.feed_forward(self, hidden, norm, eps, gate_up, down, activation)
        else:
            super().feed_forward(hidden, norm, eps, gate_up, down, activation)

    def _begin(self, x: Tensor, norm: Tensor | None, eps: float, linear: Linear) -> tuple[Linear, LoraUpdate | None]:
        """Returns the product without adapters, and the update that is due to it."""
        if not isinstance(linear, AdaptedLinear):
            return linear, None
        return linear.base, self.update(x, norm, eps, linear.tables)


class PlainLoraProducts(LoraProducts):
    """The updates in plain PyTorch, on any device; a step in which no token has an adapter does nothing more."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self._step = threading.local()

    def note_adapters(self, numbers: Tensor | None) -> None:
        """Finds the tokens of each adapter."""
        found = [] if numbers is None else [number for number in set(numbers.tolist()) if number]
        self._step.tokens = {number - 1: torch.where(numbers == number)[0] for number in found}

    def keep_tokens(self, kept: Tensor) -> None:
        """Drops the adapters of the other tokens."""
        super().keep_tokens(kept)
        self._step.tokens = {slot: torch.where(torch.isin(kept, some))[0] for slot, some in self._step.tokens.items()}

    def update(self, x: Tensor, norm: Tensor | None, eps: float, tables: LoraTables) -> LoraUpdate | None:
        """Multiplies the tokens of each adapter."""
        tokens = self._step.tokens
        if not tokens:
            return None
        return _PlainUpdate(
            tables,
            [
                (slot, some, (x[some] if norm is None else rms_norm(x[some], norm, eps)) @ tables.a[slot].T)
                for slot, some in tokens.items()
            ],
        )


class _PlainUpdate:
    """The tokens of each adapter, and A · x of them."""

    def __init__(self, tables: LoraTables, found: list[tuple[int, Tensor, Tensor]]) -> None:
        self._tables, self._found = tables, found

    def add_to(self, out: Tensor) -> None:
        """See `LoraUpdate`."""
        for slot, some, low in self._found:
            parts = torch.split(low, self._tables.rank, dim=1)
            updates = [
                part @ self._tables.b[slot, rows.start : rows.stop].T
                for part, rows in zip(parts, self._tables.part_rows, strict=True)
            ]
            out[some] += torch.cat(updates, dim=1)

    def activated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `LoraUpdate`."""
        self.add_to(gate_up)
        return activate(gate_up, activation)


class LoraReferenceKernels(PlainLoraProducts, ReferenceKernels):
    """The plain kernels with adapters."""
