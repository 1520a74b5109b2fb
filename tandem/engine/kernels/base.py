"""The interface to the hardware: the operations of a decoder's layers, fused as fast implementations need it.

`reference.py` is the plain PyTorch implementation, on any device, and the reference of all others. T is the number of
tokens in the step over all rows, R the number of rows. Every tensor is contiguous unless said otherwise; `hidden` is
the residual stream [T, hidden_size] in the model's dtype.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.kv_cache import KvCache
from tandem.engine.kernels.layers import AttentionLayer, DenseLayer, Experts, ExpertsLayer, LatentLayer, Linear, Norm


@dataclass(frozen=True, slots=True)
class DraftGroups:
    """The rows of one token that attention computes together, as they are of one request: its KV is read once.

    A group is a row and up to `rows` - 1 rows of the positions after it, which follow one another.

    table [groups + 1, 3] int32, on the device: the group's first row, the row of the next position, and the number of
          rows; 0 = no group, after all groups. The last entry begins with the number of rows that are in groups: the
          rows after these are padding.
    rows  host int, the largest number of rows of a group
    """

    table: Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The positions and cache slots of a step's tokens, shared by all layers of a group (`tandem/engine/config/kv.py`).

    All int32 on the device unless said otherwise.

    positions     [T]     position of each token in its request
    slots         [T]     int64: page_id · page_tokens + offset, at which each token's KV is stored
    row_starts    [R + 1] token t of the step belongs to row r when row_starts[r] <= t < row_starts[r + 1]
    context_lens  [R]     tokens in the cache once this step's are stored
    page_table    [R, max_pages] page ids of each row, padded with 0; before the pages that the row's tokens see, some
                  page that they do see
    max_row_tokens, max_context: host ints, the largest row and the largest context
    single_rows: host int, how many rows at the front have one token
    max_cached: host int, a bound of the tokens that the other rows had in the cache before; None = it is not known
    group: host int, the number of the group: only `slots` and `page_table` differ between groups
    adapters: [T] each token's adapter from 1, 0 = none; None = the model has none
    draft_groups: where all rows have one token and some verify drafts, which of them attention computes together
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
    max_cached: int | None = None
    group: int = 0
    adapters: Tensor | None = None
    draft_groups: DraftGroups | None = None

    @property
    def decode_only(self) -> bool:
        """True if every row has one token."""
        return self.max_row_tokens == 1


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that only the device knows: where sources[t] >= 0, token t of the step is drawn[sources[t]].

    sources [T] int32; drawn [n] int64, the tokens that the step before drew; token 0 stands for NO_TOKEN.
    """

    sources: Tensor
    drawn: Tensor

    def tokens(self, token_ids: Tensor) -> Tensor:
        """Returns the step's tokens [T] int64, of which `token_ids` has those that the host knows."""
        sources = self.sources.long()
        return torch.where(sources >= 0, self.drawn[sources.clamp(min=0)].clamp(min=0), token_ids)


class Products(ABC):
    """The dense products of a model's layers."""

    @abstractmethod
    def prepare(self, linear: Linear) -> Linear:
        """Called once for each weight after loading; may repack or dequantize it."""

    @abstractmethod
    def norm_linear(self, hidden: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """Returns RMSNorm(hidden) · weightᵀ + bias → [T, out]: the stacked q/k/v product, and the output layer."""

    @abstractmethod
    def norm_gate_up(self, hidden: Tensor, norm: Norm, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Returns activation(g) · u with [g | u] = RMSNorm(hidden) · gate_upᵀ (gate rows first) → [T, intermediate].

        `activation` is one of `DenseFeedForward.activation`.
        """

    @abstractmethod
    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns x · weightᵀ + bias → [T, out]."""

    @abstractmethod
    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Adds x · weightᵀ + bias to `hidden` in place: attention's and the MLP's output products."""

    def feed_forward(self, hidden: Tensor, layer: DenseLayer) -> None:
        """Adds down · (activation(g) · u) to `hidden` in place, with `norm_gate_up`'s g and u.

        The default computes one after the other.
        """
        active = self.norm_gate_up(hidden, layer.norm, layer.gate_up, layer.activation)
        self.linear_add(active, layer.down, hidden)


class Kernels(Products):
    """One implementation of a layer's arithmetic. Holds no request state and may cache scratch memory."""

    def prepare(self, linear: Linear) -> Linear:
        """Called once for each weight after loading; may repack or dequantize it. The default keeps it."""
        return linear

    def prepare_experts(self, experts: Experts) -> Experts:
        """Like `prepare`, for the weights of a mixture of experts."""
        return experts

    @property
    def prompts_capturable(self) -> bool:
        """True if a CUDA graph may contain prefill: no launch asks the device for the rows' lengths."""
        return False

    @property
    def capturable_tokens(self) -> int | None:
        """The largest number of prompt tokens of a step that a CUDA graph may contain; None = any."""
        return None

    @property
    def capturable_pages(self) -> int | None:
        """The largest number of KV pages of all prompts of a step that a CUDA graph may contain; None = any."""
        return None

    def draft_group_rows(self, drafts: int) -> int:
        """Returns the most rows of a group (`DraftGroups`) in steps where a request has up to `drafts` drafts.

        1, the default: attention computes each row by itself, and steps need no groups.
        """
        return 1

    def reserve_draft_groups(self, groups: int, rows: int) -> None:
        """Allocates the scratch memory of steps with up to `groups` groups of up to `rows` rows, before any such step.

        The default does nothing.
        """

    def end_trials(self) -> None:
        """Resets the scratch memory that concurrent trials (`tandem/engine/cuda/compile_ahead.py`) have used.

        Called once after all trials. The default does nothing.
        """

    def begin_step(self, cache: KvCache, layout: StepLayout) -> None:
        """Called once for each KV group before a step's first layer, for work that all layers of the group share.

        The first group comes last, so that `embed` follows what is launched for all groups.

        The default does nothing.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor, feed: Feed | None = None) -> Tensor:
        """Returns the rows of `table` [vocab, hidden] for `token_ids` [T] (int64) → [T, hidden]; see `Feed`."""

    @abstractmethod
    def norm_add(self, x: Tensor, norm: Norm, hidden: Tensor) -> None:
        """Adds RMSNorm(x) to `hidden` in place; x [T, hidden_size] may be overwritten."""

    @abstractmethod
    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor) -> None:
        """Adds the output of a mixture of experts for RMSNorm(hidden) to `hidden` in place.

        The router's product accumulates and stays in float32: rounded to bfloat16, other experts are chosen. slots [T]
        int64 as in `StepLayout`: tokens with -1 are padding, choose no expert, and may get any value.
        """

    @abstractmethod
    def rope_and_store(self, qkv: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Applies RMSNorm to q and k where the layer has norms, and rotary embedding, and stores k and v in the cache.

        qkv    [T, (heads + 2·kv_heads)·head_dim]; may be overwritten
        cache  [pages, layers, 2, kv_heads, page_tokens, head_dim]: written at `layout.slots`; see `QuantizedKv`
        → q [T, heads, head_dim], which may be a view into qkv
        """

    @abstractmethod
    def attention(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Computes causal attention of each row's tokens over its pages.

        Q [T, heads, head_dim] → [T, heads·head_dim].
        """

    @abstractmethod
    def latent_store(self, q: Tensor, latents: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Rotates queries, and norms and stores the latents of latent attention.

        q       [T, heads·(nope + rope)], rows may be strided; may be overwritten
        latents [T, latent + rope], rows may be strided: the latent, then the key that all heads share
        cache   [pages, layers, 1, 1, page_tokens, latent + rope]: written at `layout.slots`
        → q [T, heads, nope + rope] with its last `rope` dimensions rotated
        """

    @abstractmethod
    def latent_attention(self, q: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Computes causal attention of each row's tokens over the latents of its pages.

        q [T, heads, nope + rope] as `latent_store` returns it → [T, heads·v_dim].
        """


def is_cpu(device: torch.device) -> bool:
    """Returns True if `device` is host memory."""
    return device.type == "cpu"
