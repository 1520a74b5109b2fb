"""Products of adapters on GPUs: one launch computes A · x of all tokens, another adds B · (A · x).

A program computes a tile of tokens for one adapter. It loads and stores only the tokens that have this adapter, and
ends at once if the tile has none. So tokens need not be sorted by adapter, the grid depends only on sizes, and a CUDA
graph may contain the launches, because the adapters' numbers are read on the device.

Sums are float32; A · x is rounded to the model's dtype before the second product, as in peft. The adapters' numbers are
read before `wait_for_inputs`, because the kernel that writes them is launched earlier and without overlap.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.kernels.latent.triton_products import dot
from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.linear.triton_activation import gated
from tandem.engine.kernels.lora_tables import LoraTables
from tandem.engine.kernels.triton_launch import INTERPRETED, launch_dependents, wait_for_inputs

_TOKEN_TILES = (16, 32, 64)
_COLUMNS = 128
"""Number of columns of x that a program multiplies at a time."""
_OUTPUTS = 128
"""Number of outputs of a product, for each token, that a program updates."""
_GATED_OUTPUTS = 64
"""Number of pairs of a gate row and an up row that a program updates."""
_SPLITS = ((1, 16), (4, 4))
"""Pairs (maximum number of token tiles, maximum number of splits of the columns of x).

Each split is computed by separate programs. With more tiles than in the last pair the columns are not split. With one
tile, a product of several parts (`LoraTables`) has half as many splits, because each part has programs of its own. The
kernels that add B · (A · x) are compiled for each number of splits; with two pairs, the steps of `TRIAL_TOKENS` compile
all variants.
"""
TRIAL_TOKENS = (16, 32, 64, 128, 512)
"""Numbers of tokens of trial steps that together use all kernels."""


class TritonUpdate:
    """The LoRA update of one product: the constructor computes A · x, and `add_to` or `activated` adds B · (A · x).

    With a norm, the first launch computes partial sums of A · (x ∘ norm.weight) and of Σ x², and the second divides by
    the root mean square. Each token has its own adapter or none. The partial sums, one for each split of the columns of
    x, are float32 of shape [splits, T, P·r] and [splits, T], with P and r as in `LoraTables`; those of tokens without
    an adapter are undefined.
    """

    def __init__(self, x: Tensor, norm: Norm | None, numbers: Tensor, tables: LoraTables, *, pdl: bool) -> None:
        """Launch the first product.

        x [T, K] and the norm's weight [K] are contiguous. numbers [T] int32 has the adapter of each token, counted from
        1; 0 = none.
        """
        tokens, self._columns = x.shape
        self._numbers, self._tables, self._pdl = numbers, tables, pdl
        self._eps = 0.0 if norm is None else norm.eps
        slots, rows, _ = tables.a.shape
        tile, parts = _token_tile(tokens), rows // tables.rank
        tiles = triton.cdiv(tokens, tile)
        columns = _columns_of_a_program(self._columns, tiles, parts)
        splits = triton.cdiv(self._columns, columns)
        self._sums = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
        self._squares = self._sums
        if norm is not None:
            self._squares = torch.empty(splits, tokens, dtype=torch.float32, device=x.device)
        self._normed = norm is not None
        _shrink[(splits * parts, slots, tiles)](
            x, x if norm is None else norm.weight, numbers, tables.a, self._sums, self._squares, tokens, self._columns,
            columns,
            NORM=self._normed, PARTS=parts, RANK=tables.rank, TOKENS=tile, COLUMNS=_COLUMNS, PDL=pdl,
            WIDE_DOT=INTERPRETED, num_warps=4, num_stages=3, launch_pdl=pdl,
        )  # fmt: skip

    def add_to(self, out: Tensor) -> None:
        """Add B · (A · RMSNorm(x)) to out [T, N] in place."""
        (tokens, n), tables = out.shape, self._tables
        tile = _token_tile(tokens)
        ends = (*tables.part_ends, n, n)
        blocks = sum(triton.cdiv(len(rows), _OUTPUTS) for rows in tables.part_rows)
        _add[(blocks, len(tables.b), triton.cdiv(tokens, tile))](
            self._sums, self._squares, self._numbers, tables.b, out, tokens, n, self._columns, self._eps, ends[0],
            ends[1],
            SPLITS=len(self._sums), NORM=self._normed, PARTS=len(tables.part_ends), RANK=tables.rank, TOKENS=tile,
            OUTPUTS=_OUTPUTS, PDL=self._pdl, WIDE_DOT=INTERPRETED, num_warps=4, launch_pdl=self._pdl,
        )  # fmt: skip

    def activated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return activation(g) · u of [g | u] = gate_up [T, 2·I] + B · (A · RMSNorm(x)) → [T, I]."""
        tokens, width, tables = gate_up.shape[0], gate_up.shape[1] // 2, self._tables
        tile = _token_tile(tokens)
        out = gate_up.new_empty(tokens, width)
        _add_gated[(triton.cdiv(width, _GATED_OUTPUTS), len(tables.b) + 1, triton.cdiv(tokens, tile))](
            self._sums, self._squares, self._numbers, tables.b, gate_up, out, tokens, width, self._columns, self._eps,
            SPLITS=len(self._sums), NORM=self._normed, GELU=activation == "gelu_tanh", RANK=tables.rank, TOKENS=tile,
            OUTPUTS=_GATED_OUTPUTS, PDL=self._pdl, WIDE_DOT=INTERPRETED, num_warps=4, launch_pdl=self._pdl,
        )  # fmt: skip
        return out


def _columns_of_a_program(k: int, tiles: int, parts: int) -> int:
    """Return the number of columns of x, of k, that a program multiplies, for `tiles` token tiles and `parts` parts."""
    splits = next((splits for most, splits in _SPLITS if tiles <= most), 1)
    if tiles == 1 and parts > 1:
        splits //= 2
    return -(-k // (splits * _COLUMNS)) * _COLUMNS


def _token_tile(tokens: int) -> int:
    return next((tile for tile in _TOKEN_TILES if tokens <= tile), _TOKEN_TILES[-1])


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x_ptr, norm_ptr, numbers_ptr, a_ptr, sums_ptr, squares_ptr, tokens, k, columns,
    NORM: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr, WIDE_DOT: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    split, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    slot = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    selected = tl.load(numbers_ptr + token, mask=token < tokens, other=0) == slot + 1
    if tl.max(selected.to(tl.int32), axis=0) > 0:
        rank = tl.arange(0, RANK)
        a_rows = a_ptr + ((slot.to(tl.int64) * PARTS + part) * RANK + rank)[:, None] * k
        acc = tl.zeros((TOKENS, RANK), dtype=tl.float32)
        square = tl.zeros((TOKENS,), dtype=tl.float32)
        begin = split * columns
        wait_for_inputs(PDL)
        for start in range(begin, tl.minimum(begin + columns, k), COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < k
            a = tl.load(a_rows + column[None, :], mask=inside[None, :], other=0.0)
            x = tl.load(
                x_ptr + token[:, None] * k + column[None, :], mask=selected[:, None] & inside[None, :], other=0.0
            )
            if NORM:
                wide = x.to(tl.float32)
                square += tl.sum(wide * wide, axis=1)
                x = (wide * tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]).to(a.dtype)
            acc = dot(x, tl.trans(a), acc, WIDE_DOT)
        at = split.to(tl.int64) * tokens + token
        tl.store(sums_ptr + at[:, None] * (PARTS * RANK) + part * RANK + rank[None, :], acc, mask=selected[:, None])
        if NORM:
            tl.store(squares_ptr + at, square, mask=selected & (part == 0))
    else:
        wait_for_inputs(PDL)


@triton.jit
def _summed(
    sums_ptr, squares_ptr, token, selected, tokens, k, eps, part,
    SPLITS: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return A · RMSNorm(x) of one part, [TOKENS, RANK] float32, by adding the partial sums."""
    rank = tl.arange(0, RANK)
    summed = tl.zeros((TOKENS, RANK), dtype=tl.float32)
    square = tl.zeros((TOKENS,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = token + split * tokens
        sums = sums_ptr + at[:, None] * (PARTS * RANK) + part * RANK + rank[None, :]
        summed += tl.load(sums, mask=selected[:, None], other=0.0)
        if NORM:
            square += tl.load(squares_ptr + at, mask=selected, other=0.0)
    if NORM:
        summed *= tl.rsqrt(square / k + eps)[:, None]
    return summed


@triton.jit(do_not_specialize=["tokens"])
def _add(
    sums_ptr, squares_ptr, numbers_ptr, b_ptr, out_ptr, tokens, n, k, eps, first_end, second_end,
    SPLITS: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, PDL: tl.constexpr, WIDE_DOT: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    block, slot = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    selected = tl.load(numbers_ptr + token, mask=token < tokens, other=0) == slot + 1
    if tl.max(selected.to(tl.int32), axis=0) > 0:
        part, begin, end = 0, block * OUTPUTS, n
        if PARTS > 1:
            first = tl.cdiv(first_end, OUTPUTS)
            second = first + tl.cdiv(second_end - first_end, OUTPUTS)
            part = (block >= first).to(tl.int32)
            begin = tl.where(block < first, begin, first_end + (block - first) * OUTPUTS)
            end = tl.where(block < first, first_end, second_end)
            if PARTS > 2:
                part += (block >= second).to(tl.int32)
                begin = tl.where(block < second, begin, second_end + (block - second) * OUTPUTS)
                end = tl.where(block < second, end, n)
        row = begin + tl.arange(0, OUTPUTS)
        inside = row < end
        b_rows = b_ptr + (slot.to(tl.int64) * n + row)[:, None] * RANK
        b = tl.load(b_rows + tl.arange(0, RANK)[None, :], mask=inside[:, None], other=0.0)
        wait_for_inputs(PDL)
        h = _summed(
            sums_ptr, squares_ptr, token, selected, tokens, k, eps, part, SPLITS, NORM, PARTS, RANK, TOKENS
        ).to(b.dtype)  # fmt: skip
        here = out_ptr + token[:, None] * n + row[None, :]
        kept = selected[:, None] & inside[None, :]
        before = tl.load(here, mask=kept, other=0.0).to(tl.float32)
        updated = dot(h, tl.trans(b), before, WIDE_DOT)
        tl.store(here, updated.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        wait_for_inputs(PDL)


@triton.jit(do_not_specialize=["tokens"])
def _add_gated(
    sums_ptr, squares_ptr, numbers_ptr, b_ptr, gate_up_ptr, out_ptr, tokens, width, k, eps,
    SPLITS: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, PDL: tl.constexpr, WIDE_DOT: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    number = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    selected = tl.load(numbers_ptr + token, mask=token < tokens, other=-1) == number
    if tl.max(selected.to(tl.int32), axis=0) > 0:
        row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = row < width
        adapted = inside & (number > 0)  # no B is read for tokens without an adapter
        slot = tl.maximum(number - 1, 0).to(tl.int64)
        b_rows = b_ptr + (slot * (2 * width) + row)[:, None] * RANK + tl.arange(0, RANK)[None, :]
        gate_b = tl.load(b_rows, mask=adapted[:, None], other=0.0)
        up_b = tl.load(b_rows + width * RANK, mask=adapted[:, None], other=0.0)
        wait_for_inputs(PDL)
        here = gate_up_ptr + token[:, None] * (2 * width) + row[None, :]
        kept = selected[:, None] & inside[None, :]
        gate = tl.load(here, mask=kept, other=0.0).to(tl.float32)
        up = tl.load(here + width, mask=kept, other=0.0).to(tl.float32)
        if number > 0:
            gate_h = _summed(
                sums_ptr, squares_ptr, token, selected, tokens, k, eps, 0, SPLITS, NORM, 2, RANK, TOKENS
            ).to(gate_b.dtype)  # fmt: skip
            up_h = _summed(
                sums_ptr, squares_ptr, token, selected, tokens, k, eps, 1, SPLITS, NORM, 2, RANK, TOKENS
            ).to(up_b.dtype)  # fmt: skip
            gate = dot(gate_h, tl.trans(gate_b), gate, WIDE_DOT)
            up = dot(up_h, tl.trans(up_b), up, WIDE_DOT)
        product = gated(gate, up, GELU)
        out = out_ptr + token[:, None] * width + row[None, :]
        tl.store(out, product.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        wait_for_inputs(PDL)
