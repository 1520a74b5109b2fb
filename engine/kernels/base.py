"""The interface to the hardware: the operations of a Llama-family layer, fused as fast implementations need it.

`reference.py` is the plain PyTorch implementation, on any device, and the reference of all others. T is the number of
tokens in the step over all rows, R the number of rows. Every tensor is contiguous unless said otherwise; `hidden` is
the residual stream [T, hidden_size] in the model's dtype.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config.attention import AttentionShape


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The positions and cache slots of a step's tokens, shared by all layers.

    All int32 on the device unless said otherwise.

    positions     [T]     position of each token in its request
    slots         [T]     int64: page_id · page_tokens + offset, at which each token's KV is stored
    row_starts    [R + 1] token t of the step belongs to row r when row_starts[r] <= t < row_starts[r + 1]
    context_lens  [R]     tokens in the cache once this step's are stored
    page_table    [R, max_pages] page ids of each row, padded with 0
    max_row_tokens, max_context: host ints, the largest row and the largest context
    single_rows: host int, how many rows at the front have one token
    decode_only: every row has one token

    In steps of fixed size (CUDA graphs) a row may be padding: its slot is -1, to store nothing, its context 0.
    """

    positions: Tensor
    slots: Tensor
    row_starts: Tensor
    context_lens: Tensor
    page_table: Tensor
    max_row_tokens: int
    max_context: int
    single_rows: int = 0

    @property
    def decode_only(self) -> bool:
        """True if every row has one token."""
        return self.max_row_tokens == 1


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in], row-major, and its bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that only the device knows: where sources[t] >= 0, token t of the step is drawn[sources[t]].

    sources [T] int32; drawn [n] int64, the tokens that the step before drew.
    """

    sources: Tensor
    drawn: Tensor


class Kernels(ABC):
    """One implementation of a layer's arithmetic. Holds no request state and may cache scratch memory."""

    def prepare(self, linear: Linear) -> Linear:
        """Called once for each weight after loading; may repack it. The default keeps it."""
        return linear

    @property
    def prompts_capturable(self) -> bool:
        """True if a CUDA graph may contain prefill: no launch asks the device for the rows' lengths."""
        return False

    def end_trials(self) -> None:  # noqa: B027 - most keep nothing
        """Resets the scratch memory that concurrent trials (`engine/cuda/compile_ahead.py`) have used.

        Called once they are over. The default does nothing.
        """

    def begin_step(self, cache: Tensor, layout: StepLayout) -> None:  # noqa: B027 - most have nothing to do
        """Called before a step's first layer, for work that all layers share. The default does nothing."""

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor, feed: Feed | None = None) -> Tensor:
        """Returns the rows of `table` [vocab, hidden] for `token_ids` [T] (int64) → [T, hidden]; see `Feed`."""

    @abstractmethod
    def norm_linear(self, hidden: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        """Returns RMSNorm(hidden) · weightᵀ + bias → [T, out]: the stacked q/k/v product, and the output layer."""

    @abstractmethod
    def norm_gate_up(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """Returns silu(g) · u with [g | u] = RMSNorm(hidden) · gate_upᵀ (gate rows first) → [T, intermediate]."""

    @abstractmethod
    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Adds x · weightᵀ + bias to `hidden` in place: attention's and the MLP's output products."""

    @abstractmethod
    def rope_and_store(
        self,
        qkv: Tensor,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cache: Tensor,
        layer: int,
        layout: StepLayout,
        shape: AttentionShape,
    ) -> Tensor:
        """Applies per-head RMSNorm to q and k where given and rotary embedding, and stores k and v in the cache.

        qkv   [T, (heads + 2·kv_heads)·head_dim]; may be overwritten
        rope  [max_context, head_dim] float32: cos of the first half of the dimensions, then sin, scaling included
        cache [pages, layers, 2, kv_heads, page_tokens, head_dim]: written at `layout.slots`
        → q [T, heads, head_dim], which may be a view into qkv
        """

    @abstractmethod
    def attention(self, q: Tensor, cache: Tensor, layer: int, layout: StepLayout, shape: AttentionShape) -> Tensor:
        """Computes causal attention of each row's tokens over its pages.

        Q [T, heads, head_dim] → [T, heads·head_dim].
        """


def is_cpu(device: torch.device) -> bool:
    """Returns True if `device` is host memory."""
    return device.type == "cpu"
