"""Variable-length attention to packed keys and values, which also returns the logarithm of each sum of weights (LSE).

The logarithms are needed to merge the results of several blocks of keys. The implementation is flash-attn-4 where it is
available, else plain PyTorch, row by row.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.fallback import failure_of, why_no_flash, why_not_imported

log = logging.getLogger(__name__)

_FLASH_MOST = 256
"""Maximum head dim of flash-attn-4 on GPUs of compute capability 9.0."""
_FLASH_ALIGNED = 8
"""flash-attn-4's head dims are multiples of this number of bfloat16 elements."""
_COMPILED_TOKENS = 257
"""Number of tokens of a row for which kernels are compiled: more than one tile of queries.

Shorter rows use absorbed attention, or share a step with rows that are longer than a tile.
"""
_SCORES = 1 << 26
"""Maximum number of scores (float32) that the plain implementation holds at a time: 256 MiB."""


class BlockAttention(Protocol):
    """Variable-length attention: the queries of each row attend to that row's own keys."""

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        q_starts: Tensor,
        key_starts: Tensor,
        key_lengths: Tensor,
        longest_q: int,
        longest_key: int,
        scale: float,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of q[q_starts[r] : q_starts[r + 1]] to keys[key_starts[r] :][: key_lengths[r]].

        q [T, heads, k_dim], keys [K, heads, k_dim] and values [K, heads, v_dim] may have strided rows; q_starts and
        key_starts [R + 1] and key_lengths [R] are int32. `causal` masks as if the last query and the last key of a row
        had the same position. Returns [T, heads, v_dim], and the logarithms of the sums of weights [heads, T] float32.
        Both are undefined for tokens that are in no row, and for tokens that see no key.
        """


def choose_block_attention(device: torch.device, dtype: torch.dtype, shapes: Iterable[LatentShape]) -> BlockAttention:
    """Choose and return the fastest implementation for these layers on this device; it is not compiled yet."""
    reason = _why_no_flash(device, dtype, shapes)
    if reason:
        log.warning("prefill of latent attention: plain PyTorch, one row at a time (%s)", reason)
        return PlainBlocks()
    log.info("prefill of latent attention: flash-attn-4")
    return FlashBlocks()


def compiled(
    chosen: BlockAttention, shapes: Iterable[LatentShape], dtype: torch.dtype, device: torch.device
) -> BlockAttention:
    """Compile the kernels of `chosen` and return it, or plain PyTorch if that fails."""
    if not isinstance(chosen, FlashBlocks):
        return chosen
    failure = failure_of(lambda: chosen.compile(shapes, dtype, device))
    if not failure:
        return chosen
    log.warning("prefill of latent attention: plain PyTorch, which is slower (flash-attn-4: %s)", failure)
    return PlainBlocks()


def _why_no_flash(device: torch.device, dtype: torch.dtype, shapes: Iterable[LatentShape]) -> str:
    if reason := why_no_flash(device, dtype):
        return reason
    for dim in (dim for shape in shapes for dim in (shape.query, shape.v_dim)):
        if dim > _FLASH_MOST or dim % _FLASH_ALIGNED:
            return f"flash-attn-4 has no head dim {dim}"
    return why_not_imported("flash_attn.cute", "flash-attn-4")


class FlashBlocks:
    """Block attention by flash-attn-4, for all rows in one launch."""

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        self._flash: Callable[..., Any] = flash_attn_varlen_func

    def compile(self, shapes: Iterable[LatentShape], dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernels that layers of these shapes need."""
        for shape in shapes:
            q = torch.zeros(_COMPILED_TOKENS, shape.heads, shape.query, dtype=dtype, device=device)
            both = torch.zeros(_COMPILED_TOKENS, shape.heads, shape.query + shape.v_dim, dtype=dtype, device=device)
            keys, values = both[..., : shape.query], both[..., shape.query :]
            starts = torch.tensor([0, _COMPILED_TOKENS], dtype=torch.int32, device=device)
            for causal in (True, False):
                self(q, keys, values, starts, starts, starts[1:], len(q), len(q), shape.scale, causal=causal)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        q_starts: Tensor,
        key_starts: Tensor,
        key_lengths: Tensor,
        longest_q: int,
        longest_key: int,
        scale: float,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute the attention of all rows in one launch."""
        out, lse = self._flash(
            q,
            keys,
            values,
            cu_seqlens_q=q_starts,
            cu_seqlens_k=key_starts,
            seqused_k=key_lengths,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_key,
            softmax_scale=scale,
            causal=causal,
            return_lse=True,
        )[:2]
        return out, lse


class PlainBlocks:
    """Block attention in plain PyTorch, row by row, with a bounded number of scores at a time.

    It synchronizes with the device to read the lengths of the rows.
    """

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        q_starts: Tensor,
        key_starts: Tensor,
        key_lengths: Tensor,
        longest_q: int,
        longest_key: int,
        scale: float,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention row by row; weights are rounded to the dtype of the values, their sums stay float32."""
        out = q.new_empty(len(q), q.shape[1], values.shape[2])
        lse = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
        begins = q_starts.tolist()
        rows = zip(begins[:-1], begins[1:], key_starts.tolist()[:-1], key_lengths.tolist(), strict=True)
        for first, end, key_start, length in rows:
            here = slice(key_start, key_start + length)
            if not length:
                continue
            row_keys, row_values = keys[here].permute(1, 2, 0), values[here].transpose(0, 1)
            at_once = max(1, _SCORES // (q.shape[1] * length))
            for start in range(first, end, at_once):
                some = slice(start, min(start + at_once, end))
                scores = (q[some].transpose(0, 1) @ row_keys).float() * scale
                if causal:
                    last = torch.arange(some.start - end, some.stop - end, device=q.device) + length
                    hidden = torch.arange(length, device=q.device) > last.unsqueeze(1)
                    scores.masked_fill_(hidden, float("-inf"))
                sums = torch.logsumexp(scores, dim=-1)
                weights = (scores - sums.unsqueeze(-1)).exp().to(q.dtype)
                out[some] = (weights @ row_values).transpose(0, 1)
                lse[:, some] = sums
        return out, lse
