"""The updates of adapters on GPUs."""

import threading

import torch
from torch import Tensor

from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.lora import triton_lora
from tandem.engine.kernels.lora.adapted_products import LoraUpdate, LoraUpdates
from tandem.engine.kernels.lora_tables import LoraTables
from tandem.engine.kernels.rowwise.triton_norm import rms_norm
from tandem.engine.kernels.triton_launch import overlaps_launches


class TritonUpdates(LoraUpdates):
    """Every step computes the updates, whichever tokens have an adapter: only the device knows that in a CUDA graph."""

    def __init__(self) -> None:
        self._pdl = overlaps_launches()
        self._step = threading.local()  # steps that compile kernels run on several threads

    @property
    def trial_tokens(self) -> tuple[int, ...]:
        """Steps with all kernels of the updates."""
        return triton_lora.TRIAL_TOKENS

    def begin_step(self, numbers: Tensor | None) -> None:
        """Keep the device's tensor."""
        self._step.numbers = numbers

    def keep_tokens(self, kept: Tensor) -> None:
        """Drop the adapters of the other tokens."""
        if self._step.numbers is not None:
            self._step.numbers = self._step.numbers[kept]

    def start(self, x: Tensor, norm: Norm | None, tables: LoraTables) -> LoraUpdate | None:
        """Launch A · x before the product, whose weight is fetched meanwhile."""
        numbers = self._step.numbers
        if numbers is None:
            return None
        if norm is not None and x.dtype == torch.float16:  # whose range x ∘ norm may leave
            x, norm = rms_norm(x, norm, pdl=self._pdl), None
        return triton_lora.TritonUpdate(x, norm, numbers, tables, pdl=self._pdl)
