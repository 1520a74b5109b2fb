"""LoRA updates on GPUs, in Triton."""

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
    """Computes the LoRA updates in every step, even if no token has an adapter.

    In a CUDA graph only the device knows which tokens have an adapter.
    """

    def __init__(self) -> None:
        self._pdl = overlaps_launches()
        self._step = threading.local()  # trial steps at the start run on several threads

    @property
    def trial_tokens(self) -> tuple[int, ...]:
        """Numbers of tokens of steps that together use all kernels of the updates."""
        return triton_lora.TRIAL_TOKENS

    def begin_step(self, numbers: Tensor | None) -> None:
        """Keep the tensor of the adapters' numbers, which is on the device."""
        self._step.numbers = numbers

    def keep_tokens(self, kept: Tensor) -> None:
        """Keep only the adapters of the tokens in `kept`."""
        if self._step.numbers is not None:
            self._step.numbers = self._step.numbers[kept]

    def start(self, x: Tensor, norm: Norm | None, tables: LoraTables) -> LoraUpdate | None:
        """Launch A · x. The caller then launches the base product, whose weight is prefetched meanwhile."""
        numbers = self._step.numbers
        if numbers is None:
            return None
        if norm is not None and x.dtype == torch.float16:  # x ∘ norm may exceed the range of float16
            x, norm = rms_norm(x, norm, pdl=self._pdl), None
        return triton_lora.TritonUpdate(x, norm, numbers, tables, pdl=self._pdl)
