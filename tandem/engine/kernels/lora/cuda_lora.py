"""The kernels of GPUs with adapters."""

import threading
from typing import Any

import torch
from torch import Tensor

from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.lora import triton_lora
from tandem.engine.kernels.lora.lora_kernels import LoraProducts, LoraUpdate
from tandem.engine.kernels.lora.tables import LoraTables
from tandem.engine.kernels.rowwise.triton_norm import rms_norm
from tandem.engine.kernels.triton_launch import overlaps_launches


class LoraCudaKernels(LoraProducts, CudaKernels):
    """Every step computes the updates, whichever tokens have an adapter: only the device knows that in a CUDA graph."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._overlapped = overlaps_launches()
        self._step = threading.local()  # steps that compile kernels run on several threads

    @property
    def trial_tokens(self) -> tuple[int, ...]:
        """Steps with all kernels of the updates."""
        return triton_lora.TRIAL_TOKENS

    def note_adapters(self, numbers: Tensor | None) -> None:
        """Keeps the device's tensor."""
        self._step.numbers = numbers

    def keep_tokens(self, kept: Tensor) -> None:
        """Drops the adapters of the other tokens."""
        super().keep_tokens(kept)
        if self._step.numbers is not None:
            self._step.numbers = self._step.numbers[kept]

    def update(self, x: Tensor, norm: Tensor | None, eps: float, tables: LoraTables) -> LoraUpdate | None:
        """Launches A · x before the product, whose weight is fetched meanwhile."""
        numbers = self._step.numbers
        if numbers is None:
            return None
        if norm is not None and x.dtype == torch.float16:  # whose range x ∘ norm may leave
            x, norm = rms_norm(x, norm, eps, pdl=self._overlapped), None
        return _TritonUpdate(x, norm, eps, numbers, tables, pdl=self._overlapped)


class _TritonUpdate:
    def __init__(
        self, x: Tensor, norm: Tensor | None, eps: float, numbers: Tensor, tables: LoraTables, *, pdl: bool
    ) -> None:
        self._columns, self._eps, self._numbers, self._tables, self._pdl = x.shape[1], eps, numbers, tables, pdl
        self._sums, self._squares = triton_lora.shrink(x, norm, numbers, tables, pdl=pdl)

    def add_to(self, out: Tensor) -> None:
        """See `LoraUpdate`."""
        triton_lora.add(
            self._sums, self._squares, self._columns, self._eps, self._numbers, self._tables, out, pdl=self._pdl
        )

    def activated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `LoraUpdate`."""
        return triton_lora.add_gated(
            self._sums, self._squares, self._columns, self._eps, self._numbers, self._tables, gate_up,
            gelu=activation == "gelu_tanh", pdl=self._pdl,
        )  # fmt: skip
