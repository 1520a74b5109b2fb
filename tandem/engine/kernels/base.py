"""The interface of the kernels: the operations of a decoder's layers, fused in the way that fast implementations need.

`reference.py` implements the interface in plain PyTorch on any device; all other implementations are tested against it.
T is the number of tokens in a step over all rows, R the number of rows. Every tensor is contiguous unless its docstring
says otherwise; `hidden` is the residual stream [T, hidden_size] in the model's dtype.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kernels.kv_cache import KvCache, StateCache
from tandem.engine.kernels.layers import (
    AttentionLayer,
    DenseLayer,
    Experts,
    ExpertsLayer,
    IndexQueries,
    LatentLayer,
    Linear,
    Norm,
    RecurrentLayer,
)


@dataclass(frozen=True, slots=True)
class DraftGroups:
    """The groups of one-token rows that attention computes together, so that the KV of a request is read once.

    A group holds rows of one request that verifies draft tokens: a first row and up to `rows` - 1 rows for the
    positions after it, which follow one another in the step.

    table [groups + 1, 3] int32, on the device: a group's first row, the row of the next position, and the number of the
          group's rows. Unused entries have 0 rows and come after all groups. The first number of the last entry is the
          number of rows in all groups; the step's rows after these are padding.
    rows  host int, the largest number of rows in a group
    """

    table: Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class RowChains:
    """The order in which state layers compute the one-token rows of a step that verifies draft tokens.

    The rows of a request follow one another. All tensors are int32 on the device.

    starts [n + 1]  request c has the tokens order[starts[c]], …, order[starts[c + 1] - 1], in the order of positions
    order  [T]      the step's tokens; those of padding rows come last
    places [T]      the place of each token in `order`
    rows            host int, the largest number of rows of a request
    """

    starts: Tensor
    order: Tensor
    places: Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Positions and cache slots of a step's tokens, shared by the layers of a KV group (`tandem/engine/config/kv.py`).

    All tensors are int32 on the device unless said otherwise.

    positions     [T]     position of each token in its request
    slots         [T]     int64: page_id · page_tokens + offset, the place at which each token's KV is stored
    row_starts    [R + 1] token t of the step belongs to row r if row_starts[r] <= t < row_starts[r + 1]
    context_lens  [R]     tokens in the cache once this step's tokens are stored
    page_table    [R, max_pages] page ids of each row, padded with 0. If the KV group has a window, the entries of pages
                  before it hold the id of the first page in the window.
    max_row_tokens, max_context: host ints, the tokens of the largest row and the largest context
    single_rows   host int, the number of rows with one token, which come first
    max_cached    host int, an upper bound of the tokens that the other rows had in the cache before the step; None =
                  unknown
    group         host int, the number of the KV group: only `slots` and `page_table` differ between groups
    adapters      [T] each token's adapter, counted from 1; 0 = no adapter; None = the model has no adapters
    draft_groups  the rows that attention computes together, if all rows of the step have one token and some rows verify
                  draft tokens; else None

    host_starts   `row_starts` in host memory, None in the steps that CUDA graphs compute: their rows differ by replay
    state_pages   [R, 2] for a group of state layers, else None: the page from which each row's state is read, -1 if the
                  row has no earlier token (its state is zero), and the page to which the new state is written
    chains        for a group of state layers of a step that verifies draft tokens, else None: the rows of each request

    In steps of fixed size (CUDA graphs) a row may be padding: its slot is -1, so that nothing is stored, and its
    context is 0; its state pages are -1.
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
    host_starts: Tensor | None = None
    state_pages: Tensor | None = None
    chains: RowChains | None = None

    @property
    def decode_only(self) -> bool:
        """True if every row has one token."""
        return self.max_row_tokens == 1


@dataclass(frozen=True, slots=True)
class DeferredTokens:
    """Tokens whose ids only the device knows: where sources[t] >= 0, token t of the step is drawn[sources[t]].

    `sources` is [T] int32. `drawn` [n] int64 has the tokens that the previous step sampled; an entry NO_TOKEN counts as
    token 0.
    """

    sources: Tensor
    drawn: Tensor

    def tokens(self, token_ids: Tensor) -> Tensor:
        """Return the step's tokens [T] int64: drawn[sources[t]] where sources[t] >= 0, else token_ids[t]."""
        sources = self.sources.long()
        return torch.where(sources >= 0, self.drawn[sources.clamp(min=0)].clamp(min=0), token_ids)


class Products(ABC):
    """The matrix products of a model's layers.

    `Kernels` extends it; adapters wrap it (`lora/adapted_products.py`).
    """

    @abstractmethod
    def prepare(self, linear: Linear) -> Linear:
        """Return the weight in the form that the other methods expect. Called once for each weight after loading.

        An implementation may repack or dequantize the weight.
        """

    @abstractmethod
    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: Linear) -> Tensor:
        """Return RMSNorm(hidden) · weightᵀ + bias → [T, out]; used for the q/k/v product and the output layer.

        Without `norm` this is the plain product. It differs from `linear` on several ranks, see there.
        """

    @abstractmethod
    def norm_gate_up(self, hidden: Tensor, norm: Norm | None, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Return activation(g) · u with [g | u] = RMSNorm(hidden) · gate_upᵀ (gate rows first) → [T, intermediate].

        Without `norm`, `hidden` is normalized already. `activation` is one of `DenseFeedForward.activation`.
        """

    @abstractmethod
    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Return x · weightᵀ + bias → [T, out].

        On several ranks x is divided, and the products are summed; the input of `norm_linear` is whole on every rank,
        and each has rows of the weight.
        """

    @abstractmethod
    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Add x · weightᵀ + bias to `hidden` in place; used for the output products of attention and of the MLP."""

    @abstractmethod
    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor, out: Tensor) -> None:
        """Add the output of a mixture of experts for RMSNorm(hidden) to `out` in place, which may be `hidden` itself.

        The router's product accumulates in float32 and is not rounded to bfloat16, because that would change the choice
        of experts. slots [T] int64 as in `StepLayout`: tokens with slot -1 are padding; they choose no expert, and
        their output is undefined.
        """

    def feed_forward(self, hidden: Tensor, layer: DenseLayer) -> None:
        """Add down · (activation(g) · u) to `hidden` in place, with g and u as in `norm_gate_up`.

        The default computes the two products one after the other.
        """
        active = self.norm_gate_up(hidden, layer.norm, layer.gate_up, layer.activation)
        self.linear_add(active, layer.down, hidden)

    def norms_apart(self, hidden: Tensor, linear: Linear) -> bool:
        """Return True if `norm_linear` and `norm_gate_up` launch the norm of `hidden` as a kernel of its own.

        Another kernel may then compute the norm instead. The default is False.
        """
        return False


class Kernels(Products):
    """Interface of the kernels of one model; each kind of hardware has an implementation.

    An implementation is created for one model when the engine is loaded (`tandem/engine/device.py`), and the model's
    layers call it. It holds no request state, and may keep scratch memory between calls.
    """

    def prepare(self, linear: Linear) -> Linear:
        """Return the weight in the form that the other methods expect. Called once for each weight after loading.

        The default returns it unchanged.
        """
        return linear

    def prepare_experts(self, experts: Experts) -> Experts:
        """Return the weights of a mixture of experts in the form that `experts` takes; like `prepare`."""
        return experts

    @property
    def prompts_capturable(self) -> bool:
        """True if a CUDA graph may contain prefill: no launch depends on row lengths that only the device knows."""
        return False

    @property
    def drafts_capturable(self) -> bool:
        """True if a CUDA graph may contain a step that verifies draft tokens; state layers compute it as short prompts.

        The default is True.
        """
        return True

    @property
    def capturable_tokens(self) -> int | None:
        """The largest number of prompt tokens in a step that a CUDA graph may contain; None = no limit."""
        return None

    @property
    def capturable_pages(self) -> int | None:
        """The largest number of KV pages of all prompts in a step that a CUDA graph may contain; None = no limit."""
        return None

    def draft_group_rows(self, drafts: int) -> int:
        """Return the maximum number of rows of a group (`DraftGroups`) for up to `drafts` draft tokens per request.

        The default is 1: attention computes each row separately, and steps need no groups.
        """
        return 1

    def reserve_draft_groups(self, groups: int, rows: int) -> None:
        """Allocate the scratch memory for later steps with up to `groups` groups of up to `rows` rows each.

        The default does nothing.
        """

    def end_trials(self) -> None:
        """Reset the scratch memory that concurrent trial steps (`tandem/engine/cuda/compile_ahead.py`) have used.

        Called once after all trial steps. The default does nothing.
        """

    def begin_step(self, cache: KvCache, layout: StepLayout) -> None:
        """Do the work of a step that all layers of a KV group share.

        Called once per KV group, before the step's first layer. Group 0 comes last, so that launches for all groups
        together can be made in its call, directly before `embed`. The default does nothing.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor, feed: DeferredTokens | None = None) -> Tensor:
        """Return the rows of `table` [vocab, hidden] for `token_ids` [T] int64 → [T, hidden].

        `feed` replaces the ids of tokens that only the device knows.
        """

    @abstractmethod
    def norm_add(self, x: Tensor, norm: Norm, hidden: Tensor) -> None:
        """Add RMSNorm(x) to `hidden` in place; x [T, hidden_size] may be overwritten."""

    @abstractmethod
    def rope_and_store(self, qkv: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Apply the layer's q and k norms, if any, and rotary embedding to q and k, and store k and v in the cache.

        qkv    [T, (heads + kv_heads)·head_dim + kv_heads·v_dim]; may be overwritten
        cache  [pages, layers, 2, kv_heads, page_tokens, head_dim]: written at `layout.slots`; see `KvCache`
        → q [T, heads, head_dim], which may be a view into qkv

        If the layer's shape has no KV heads, qkv has only queries, and nothing is stored.
        """

    @abstractmethod
    def attention(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Compute causal attention of each row's tokens over the row's pages.

        q [T, heads, head_dim] → [T, heads·v_dim].
        """

    @abstractmethod
    def latent_store(self, q: Tensor, latents: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Rotate the queries of latent attention, and store the normed latents and the rotated shared keys.

        q       [T, heads·(nope + rope)], rows may be strided; may be overwritten
        latents [T, latent + rope], rows may be strided: the latent, then the key that all heads share
        cache   [pages, layers, 1, 1, page_tokens, shape.cached]: written at `layout.slots`
        → q [T, heads, nope + rope] with its last `rope` dimensions rotated
        """

    @abstractmethod
    def latent_attention(self, q: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Compute causal attention of each row's tokens over the latents in the row's pages.

        q [T, heads, nope + rope] as `latent_store` returns it → [T, heads·v_dim].
        """

    @abstractmethod
    def index_store(
        self, queries: Tensor, keys: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Rotate the index queries of sparse attention, and store the normed and rotated index keys.

        queries [T, index.heads·index.dim]; may be overwritten
        keys    [T, index.dim]
        cache   as for `latent_store`: the keys are written after the latents
        → queries [T, index.heads, index.dim] with the first `rope` dimensions of each head rotated
        """

    @abstractmethod
    def choose_tokens(self, index: IndexQueries, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Return the positions [T, index.top_k] int32 of the cached tokens with the highest index scores.

        A token chooses among the positions up to its own. The entries after the chosen positions are -1.
        """

    @abstractmethod
    def sparse_attention(
        self, q: Tensor, chosen: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Compute attention of each token over the latents of its chosen positions.

        q [T, heads, nope + rope] as `latent_store` returns it, chosen [T, any] as `choose_tokens` returns it
        → [T, heads·v_dim].
        """

    @abstractmethod
    def mix_states(self, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
        """Compute a state layer between its projections, and write the state of each row after its last token.

        projected [T, sum(layer.spec.projected)]: the rows of the input projections
        → [T, layer.spec.inner]: the output, gated and normalized

        Each row begins with the state in its first page of `layout.state_pages`, and the new state is written to the
        second.
        """


def is_cpu(device: torch.device) -> bool:
    """Return True if `device` is host memory."""
    return device.type == "cpu"
