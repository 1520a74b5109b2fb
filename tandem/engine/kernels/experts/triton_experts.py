"""The routed experts of a mixture-of-experts layer on a GPU, in four to seven launches that a CUDA graph can capture.

Grids have the size for the largest possible number of tiles, and buffers the size for all (token, expert) pairs, so
the host need not know how the tokens are distributed over the experts. The launches are:

1. the norm of the input, only for float32 or more than `FUSED_NORM_TOKENS` tokens; otherwise part of the next launch
2. the router's product
3. the choice of experts, which in small 16-bit steps also sorts the pairs by expert
4. the sorting of the pairs, if the choice has not done it
5. the gate and up products with the activation
6. the down product
7. the sum over each token's experts

With unpacked 16-bit weights, a step of one token needs no sorting, and its down product also computes the sum.

In float32 all steps use the same tiles, so a token's results do not depend on the other tokens. In the 16-bit types
this holds only among steps that use the same tiles (see `expert_tiles`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from tandem.engine.kernels.experts import packed_experts
from tandem.engine.kernels.experts.expert_tiles import (
    ExpertShape,
    ExpertTile,
    RouterTile,
    max_tiles,
    router_tile,
    tile_for,
)
from tandem.engine.kernels.experts.triton_products import (
    ACTIVATIONS,
    shared_gate_kernel,
    single_down_kernel,
    single_gate_up_kernel,
    sum_kernel,
    tile_kernel,
)
from tandem.engine.kernels.experts.triton_router import (
    CHOOSE,
    COUNT,
    SCORES,
    SORT,
    choice_kernel,
    router_kernel,
    sort_kernel,
)
from tandem.engine.kernels.layers import ExpertsLayer, Norm
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.rowwise.triton_norm import rms_norm

FUSED_NORM_TOKENS = 64
"""Maximum number of tokens of a step for which the router's product also computes the norm.

Each program of the product repeats the norm of the whole row.
"""
_SORTED_NUMBERS = 4096
"""Maximum of tokens · experts for which one program chooses and sorts: a tensor takes 16 registers of each thread."""
_CHOICE_TOKENS = 4
"""Number of tokens per program of `choice_kernel`, unless one program chooses and sorts for the whole step.

One program does so in 16-bit types, up to `_SORTED_NUMBERS`.
"""
_SORT_CHUNK = 4096
_SUM_COLUMNS, _GATE_COLUMNS = 512, 1024


class Choice:
    """The chosen experts of a step's tokens, on the device."""

    def __init__(self, tokens: int, shape: ExpertShape, device: torch.device) -> None:
        """Allocate memory for `tokens` tokens."""
        self.pairs = tokens * shape.top_k
        self.weights = torch.empty(self.pairs, dtype=torch.float32, device=device)
        self.experts = torch.empty(self.pairs, dtype=torch.int32, device=device)
        """The expert of each pair, among those of this rank; -1 for padding tokens and experts of other ranks."""


class TiledChoice(Choice):
    """The chosen experts, with the list of each expert's (token, expert) pairs, see `triton_router`."""

    def __init__(self, tokens: int, shape: ExpertShape, tile_tokens: int, device: torch.device) -> None:
        super().__init__(tokens, shape, device)
        self.tile_tokens = tile_tokens
        self.max_tiles = max_tiles(self.pairs, shape.experts, tile_tokens)
        self.tiles = torch.empty(self.max_tiles + 1, dtype=torch.int32, device=device)
        self.order = torch.empty(self.max_tiles * tile_tokens, dtype=torch.int32, device=device)


class ExpertKernels:
    """Computes the routed experts of any layer. Owned by `CudaKernels`; keeps no state."""

    def __init__(self, pdl: bool) -> None:
        self._pdl = pdl

    def add(
        self,
        hidden: Tensor,
        layer: ExpertsLayer,
        slots: Tensor,
        out: Tensor,
        tile: ExpertTile | None = None,
        *,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Add the routed experts' output to `out` (see `Products.experts`), and return RMSNorm(hidden).

        `out` may be `hidden`: the norm is computed before the addition. `tile` replaces that of `tile_for`. `project`
        computes the experts' inputs [T, L] from RMSNorm(hidden); None = that is their input. `out` is [T, L], too.
        """
        experts, spec, (tokens, width) = layer.experts, layer.spec, hidden.shape
        shape = ExpertShape(spec.experts, spec.top_k, out.shape[1], spec.width)
        plan = router_tile(tokens, replace(shape, hidden=width), hidden.element_size())
        counts = torch.empty(triton.next_power_of_2(spec.experts), dtype=torch.int32, device=hidden.device)
        x, logits = self._route(hidden, layer, counts, plan)
        inputs = x if project is None else project(x)
        form = packed_experts.form_of(experts)
        unpacked = packed_experts.dequantizes(form, shape.tokens_an_expert(tokens), hidden.dtype)
        tile = tile or tile_for(tokens, shape, hidden.element_size(), None if unpacked else form)
        if tile.tokens == 1:
            choice = Choice(tokens, shape, hidden.device)
            self._choose(logits, layer, slots, choice, counts, x.dtype)
            self._add_single(*_inputs(inputs, layer, choice), layer, choice, out, tile)
            return x
        tiled = TiledChoice(tokens, shape, tile.tokens, hidden.device)
        self._choose(logits, layer, slots, tiled, counts, x.dtype)
        self._add_tiles(*_inputs(inputs, layer, tiled), layer, tiled, out, tile, unpacked)
        return x

    def gate(self, inner: Tensor, x: Tensor, gate: Tensor) -> None:
        """Multiply each row of inner [T, any] by sigmoid(x · gateᵀ) in place; x [T, H], gate [1, H].

        `gate` scales the output of the shared expert. The expert's down product is linear, so its input is scaled
        instead.
        """
        tokens, width = inner.shape
        shared_gate_kernel[(tokens,)](
            x, gate, inner, H=x.shape[1], WIDTH=width, COLUMNS=_GATE_COLUMNS, PDL=self._pdl, launch_pdl=self._pdl
        )

    def _route(self, hidden: Tensor, layer: ExpertsLayer, counts: Tensor, plan: RouterTile) -> tuple[Tensor, Tensor]:
        """Return RMSNorm(hidden), and partial sums of the logits over the columns, [splits, T, E] float32."""
        (tokens, width), norm, router = hidden.shape, layer.norm, layer.experts.router
        experts = len(router)
        own = layer.experts.router_norm
        fused = tokens <= FUSED_NORM_TOKENS and hidden.dtype != torch.float32 and own is None
        x = torch.empty_like(hidden) if fused else rms_norm(hidden, norm, pdl=self._pdl)
        routed = x if own is None else rms_norm(hidden, Norm(own, norm.eps), pdl=self._pdl)
        logits = torch.empty(plan.splits, tokens, experts, dtype=torch.float32, device=hidden.device)
        grid = (triton.cdiv(experts, plan.experts), triton.cdiv(tokens, plan.tokens), plan.splits)
        router_kernel[grid](
            hidden, norm.weight, router, routed, logits, counts, tokens, norm.eps,
            H=width, E=experts, NORM=fused, SPLITS=plan.splits, TOKENS=plan.tokens, EXPERTS=plan.experts,
            COLUMNS=plan.columns, ZEROED=len(counts), PDL=self._pdl, num_warps=4, num_stages=3, launch_pdl=self._pdl,
        )  # fmt: skip
        return x, logits

    def _choose(
        self,
        logits: Tensor,
        layer: ExpertsLayer,
        slots: Tensor,
        choice: Choice,
        counts: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Choose the experts from the logits and write them to `choice`; `dtype` is that of the model."""
        experts, spec, (splits, tokens, _) = layer.experts, layer.spec, logits.shape
        router = spec.router
        groups = triton.next_power_of_2(router.groups)
        size = triton.next_power_of_2(spec.experts // router.groups)
        rows, task = _CHOICE_TOKENS, COUNT.value
        if dtype != torch.float32 and triton.next_power_of_2(tokens) * groups * size <= _SORTED_NUMBERS:
            rows, task = triton.next_power_of_2(tokens), SORT.value
        tiles, order, most, tile_tokens = choice.experts, choice.experts, 0, 1
        if isinstance(choice, TiledChoice):
            tiles, order, most, tile_tokens = choice.tiles, choice.order, choice.max_tiles, choice.tile_tokens
        else:
            task = CHOOSE.value
        # If one program can hold the whole step, it chooses and sorts in one launch; else the choice only counts, and
        # another kernel sorts.
        # Tensors that a variant does not access still need an address.
        any_bias = logits if experts.router_bias is None else experts.router_bias
        any_choice_bias = logits if experts.choice_bias is None else experts.choice_bias
        any_scale = logits if experts.expert_scales is None else experts.expert_scales
        any_used = choice.experts if experts.tokens is None else experts.tokens
        choice_kernel[(triton.cdiv(tokens, rows),)](
            logits, any_bias, any_choice_bias, any_scale, slots, choice.weights, choice.experts, counts, any_used,
            tiles, order, tokens, most, router.scaling,
            E=spec.experts, FIRST=spec.local_experts.start, LOCAL=len(spec.local_experts),
            TOP_K=spec.top_k, SPLITS=splits, SCORE=SCORES[router.score],
            RENORMALIZE=router.renormalize, GROUPS=router.groups, TOP_GROUPS=router.top_groups,
            TOP_2_SUM=router.group_score == "top_2_sum", BIAS=experts.router_bias is not None,
            CHOICE_BIAS=experts.choice_bias is not None, SCALED=experts.expert_scales is not None,
            COUNTED=experts.tokens is not None, TASK=task, TILE=tile_tokens, TOKENS=rows, BLOCK_G=groups, BLOCK_S=size,
            BLOCK_K=triton.next_power_of_2(spec.top_k), PDL=self._pdl,
            num_warps=min(max(rows * groups * size // 256, 1), 8), launch_pdl=self._pdl,
        )  # fmt: skip
        if task == COUNT.value:
            sort_kernel[(len(spec.local_experts),)](
                choice.experts, counts, tiles, order, choice.pairs, most,
                E=len(spec.local_experts), TILE=tile_tokens,
                CHUNK=min(triton.next_power_of_2(choice.pairs), _SORT_CHUNK), BLOCK_E=len(counts),
                PDL=self._pdl, num_warps=8, launch_pdl=self._pdl,
            )  # fmt: skip

    def _add_tiles(
        self,
        x: Tensor,
        weights: Tensor,
        layer: ExpertsLayer,
        choice: TiledChoice,
        hidden: Tensor,
        tile: ExpertTile,
        unpacked: bool,
    ) -> None:
        """Add the products of tiles to `hidden`; `x` and `weights` are those of `_inputs`.

        With `unpacked`, packed weights are dequantized first, some experts at a time.
        """
        experts, spec = layer.experts, layer.spec
        (tokens, width), pairs = hidden.shape, choice.pairs
        # No product writes the pairs of padding tokens and of other ranks' experts, but their rows are quantized too.
        # Zeros are for the interpreter on CPUs, which warns of arithmetic with undefined numbers.
        inner = (x.new_empty if x.is_cuda else x.new_zeros)(pairs, spec.width)
        parts = x.new_empty(pairs, width)
        activation, shared_by = ACTIVATIONS[spec.activation], pairs // len(x)
        for gated, source, weight, bias, out, product in (
            (True, x, experts.gate_up, experts.gate_up_bias, inner, tile.gate_up),
            (False, inner, experts.down, experts.down_bias, parts, tile.down),
        ):
            outputs = out.shape[1]
            if isinstance(weight, PackedWeight) and not unpacked:
                packed_experts.launch(
                    source, weight, bias, weights, choice.tiles, choice.order, out, tile, top_k=shared_by,
                    activation=activation if gated else None, pdl=self._pdl,
                )  # fmt: skip
                continue
            for some, matrices in packed_experts.matrices_of(weight, source.dtype):
                tile_kernel[(choice.max_tiles, triton.cdiv(outputs, product.rows))](
                    source, matrices, source if bias is None else bias, weights, choice.tiles, choice.order, out,
                    pairs, choice.max_tiles, some.start, len(matrices),
                    N=outputs, K=source.shape[1], E=len(weight), TOP_K=shared_by, GATED=gated,
                    ACTIVATION=activation, BIAS=bias is not None, SOME=len(matrices) < len(weight),
                    ROWS=product.rows, TOKENS=tile.tokens, COLUMNS=product.columns, PDL=self._pdl,
                    num_warps=product.warps, num_stages=product.stages, launch_pdl=self._pdl,
                )  # fmt: skip
        sum_kernel[(tokens, triton.cdiv(width, _SUM_COLUMNS))](
            parts, choice.experts, hidden, H=width, TOP_K=spec.top_k, ALL_LOCAL=spec.local is None,
            BLOCK=_SUM_COLUMNS, PDL=self._pdl,
            num_warps=2, launch_pdl=self._pdl,
        )  # fmt: skip

    def _add_single(
        self, x: Tensor, weights: Tensor, layer: ExpertsLayer, choice: Choice, hidden: Tensor, tile: ExpertTile
    ) -> None:
        """Add the experts' output of one token to `hidden`; `x` and `weights` are those of `_inputs`."""
        experts, spec = layer.experts, layer.spec
        width, ranks = hidden.shape[1], triton.next_power_of_2(spec.top_k)
        gate_up, down = tile.gate_up, tile.down
        inner = x.new_empty(spec.top_k, spec.width)
        bias, down_bias = experts.gate_up_bias, experts.down_bias
        single_gate_up_kernel[(triton.cdiv(spec.width, gate_up.rows), spec.top_k)](
            x, experts.matrices[0], x if bias is None else bias, choice.experts, inner,
            N=spec.width, K=width, X_STRIDE=width if spec.router.on_input else 0, E=len(experts.matrices[0]),
            ACTIVATION=ACTIVATIONS[spec.activation], BIAS=bias is not None, ROWS=gate_up.rows,
            COLUMNS=min(triton.next_power_of_2(width), gate_up.columns), PDL=self._pdl, num_warps=gate_up.warps,
            launch_pdl=self._pdl,
        )  # fmt: skip
        columns = min(triton.next_power_of_2(spec.width), max(down.columns // ranks, 1))
        single_down_kernel[(triton.cdiv(width, down.rows),)](
            inner, experts.matrices[1], x if down_bias is None else down_bias, weights, choice.experts, hidden,
            N=width, K=spec.width, E=len(experts.matrices[1]), TOP_K=spec.top_k, BIAS=down_bias is not None,
            ROWS=down.rows, COLUMNS=columns, BLOCK_K=ranks, PDL=self._pdl, num_warps=down.warps, launch_pdl=self._pdl,
        )  # fmt: skip


def _inputs(x: Tensor, layer: ExpertsLayer, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return the inputs of the gated product, and the factors of the outputs [pairs].

    The inputs are `x` [T, H], or, with `ExpertRouter.on_input`, one row for each pair: x · the pair's weight.
    """
    if not layer.spec.router.on_input:
        return x, choice.weights
    rows = x.repeat_interleave(layer.spec.top_k, dim=0) * choice.weights.to(x.dtype)[:, None]
    return rows, torch.ones_like(choice.weights)
