"""LoRA updates in plain PyTorch, on any device."""

import threading

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.lora.adapted_products import LoraUpdate, LoraUpdates
from tandem.engine.kernels.lora_tables import LoraTables
from tandem.engine.kernels.reference import activate, rms_norm


class PlainUpdates(LoraUpdates):
    """LoRA updates with one small product per adapter in the step, and none in steps without adapters."""

    def __init__(self) -> None:
        self._step = threading.local()

    def begin_step(self, numbers: Tensor | None) -> None:
        """Find the tokens of each adapter."""
        used = [] if numbers is None else [number for number in set(numbers.tolist()) if number]
        self._step.tokens = {number - 1: torch.where(numbers == number)[0] for number in used}

    def keep_tokens(self, kept: Tensor) -> None:
        """Remove the tokens that are not kept, and renumber the others."""
        self._step.tokens = {slot: torch.where(torch.isin(kept, some))[0] for slot, some in self._step.tokens.items()}

    def start(self, x: Tensor, norm: Norm | None, tables: LoraTables) -> LoraUpdate | None:
        """Multiply the tokens of each adapter by the adapter's A."""
        tokens = self._step.tokens
        if not tokens:
            return None
        parts = []
        for slot, some in tokens.items():
            inputs = x[some] if norm is None else rms_norm(x[some], norm.weight, norm.eps)
            parts.append((slot, some, inputs @ tables.a[slot].T))
        return _PlainUpdate(tables, parts)


class _PlainUpdate:
    """The LoRA update of one product: the tokens of each adapter, and their A · x."""

    def __init__(self, tables: LoraTables, parts: list[tuple[int, Tensor, Tensor]]) -> None:
        self._tables, self._parts = tables, parts

    def add_to(self, out: Tensor) -> None:
        for slot, some, low in self._parts:
            by_part = torch.split(low, self._tables.rank, dim=1)
            updates = [
                part @ self._tables.b[slot, rows.start : rows.stop].T
                for part, rows in zip(by_part, self._tables.part_rows, strict=True)
            ]
            out[some] += torch.cat(updates, dim=1)

    def activated(self, gate_up: Tensor, activation: str) -> Tensor:
        self.add_to(gate_up)
        return activate(gate_up, activation)
