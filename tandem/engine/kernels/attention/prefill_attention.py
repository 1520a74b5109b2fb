"""Attention of rows with many tokens: flash-attn-4 over the paged cache where it is available, else PyTorch's SDPA."""

import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cost_model.step_grid import TILE_TOKENS
from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_tails import clear_value_tails
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.fallback import failure_of, why_no_flash, why_not_imported
from tandem.engine.kernels.kv_cache import KvCache, kv_view, layer_part, unquantized, value_dim
from tandem.engine.kernels.layers import AttentionLayer
from tandem.engine.kernels.reference import attend, first_read, gather_row, visible
from tandem.protocol.ending import pages_for

log = logging.getLogger(__name__)

_FLASH_DIMS = (64, 96, 128, 256)
_FLASH_UNEQUAL_DIMS = (192, 128)
"""The dimensions of keys and of values, if they differ, for which flash-attn-4 is used."""
_SDPA_SCORES = 1 << 26
"""Maximum number of scores computed at a time. Some of SDPA's implementations store all of them: 256 MiB in float32."""
_SOFTCAP, _SINKS = "softcap", "learnable_sink"
"""Names of flash-attn-4's arguments for `AttentionShape.softcap` and for sinks."""
COMPILED_LENGTHS = (1, 257)
"""Row lengths in tokens to compile for: flash-attn-4 has one kernel for up to a tile of queries, another for more."""
_FLASH_PAGE = 128
"""The page size in tokens that flash-attn-4 loads by TMA; pages of other sizes are loaded by its threads."""


def leaves_idle(tokens: int, heads: int, multiprocessors: int) -> bool:
    """Return True if attention of `tokens` prompt tokens occupies at most three quarters of the multiprocessors.

    Each multiprocessor computes the attention of one tile of tokens for one head.
    """
    return 4 * -(-tokens // TILE_TOKENS) * heads <= 3 * multiprocessors


class AttentionKind(NamedTuple):
    """A kind of attention layer, for which kernels are chosen and compiled."""

    shape: AttentionShape
    sinks: bool = False
    """True if the layers' heads have sinks."""


class PrefillAttention(Protocol):
    """Interface of prefill attention, for the rows of a step from `first_row` on, which have many tokens.

    `CudaKernels` owns it; the thread that runs the step calls it.
    """

    def begin_step(self, cache: KvCache, layout: StepLayout, first_row: int) -> None:
        """Prepare a step. Called once before the step's first layer; `cache` is as in `Kernels.rope_and_store`."""

    def __call__(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout, first_row: int) -> Tensor:
        """Compute attention: q [T, heads, head_dim] of the whole step → [T, heads, v_dim], contiguous.

        The result of the rows before `first_row`, which have one token each, is undefined; the caller overwrites it
        (see `Kernels.attention`).
        """


def choose_prefill_attention(
    device: torch.device, dtype: torch.dtype, kinds: Collection[AttentionKind], page_tokens: int, *, pdl: bool
) -> PrefillAttention:
    """Return the fastest implementation for layers of these kinds on this device, not compiled yet.

    The choice is logged, with a warning if flash-attn-4 is slower with pages of `page_tokens` tokens.
    """
    reason = _why_no_flash(device, dtype, kinds, page_tokens)
    if reason:
        log.warning("prefill attention: PyTorch SDPA, one row at a time (%s)", reason)
        return SdpaPrefill()
    if page_tokens != _FLASH_PAGE:
        log.warning("pages of %d tokens slow prefill attention down; %d is the fast size", page_tokens, _FLASH_PAGE)
    log.info("prefill attention: flash-attn-4")
    others = sorted({kind.shape.head_dim for kind in kinds if not has_flash_kernel(kind.shape)})
    if others:
        log.warning("prefill attention of heads of %s dimensions: PyTorch SDPA, one row at a time", others)
    return FlashPrefill(page_tokens, pdl)


def compiled(
    chosen: PrefillAttention, kinds: Iterable[AttentionKind], dtype: torch.dtype, device: torch.device
) -> PrefillAttention:
    """Compile the kernels of `chosen` for layers of these kinds, and return `chosen`.

    If compilation fails, returns SDPA, which needs none.
    """
    if not isinstance(chosen, FlashPrefill):
        return chosen
    failure = failure_of(lambda: chosen.compile(kinds, dtype, device))
    if not failure:
        return chosen
    log.warning("prefill attention: PyTorch SDPA, one row at a time, which is slower (flash-attn-4: %s)", failure)
    return SdpaPrefill()


def _why_no_flash(device: torch.device, dtype: torch.dtype, kinds: Collection[AttentionKind], page_tokens: int) -> str:
    if reason := why_no_flash(device, dtype):
        return reason
    if not any(has_flash_kernel(kind.shape) for kind in kinds):
        return f"flash-attn-4 is used for head dims {', '.join(map(str, _FLASH_DIMS))}, and 192 with values of 128"
    if page_tokens % _FLASH_PAGE and any(kind.shape.most_seen is not None for kind in kinds):
        # Its tiles of keys would reach into pages before the window, which may belong to other requests by then.
        return f"flash-attn-4 computes windows over pages of {_FLASH_PAGE} tokens only"
    return why_not_imported("flash_attn.cute", "flash-attn-4") or _what_flash_lacks(kinds)


def has_flash_kernel(shape: AttentionShape) -> bool:
    """Return True if flash-attn-4 is used for heads of these dimensions."""
    if shape.v_dim == shape.head_dim:
        return shape.head_dim in _FLASH_DIMS
    return (shape.head_dim, shape.v_dim) == _FLASH_UNEQUAL_DIMS


def _what_flash_lacks(kinds: Collection[AttentionKind]) -> str:
    """Return an error that names an argument that these kinds need and the installed flash-attn-4 lacks, else ""."""
    from flash_attn.cute import flash_attn_varlen_func

    wanted = {_SOFTCAP for kind in kinds if kind.shape.softcap is not None}
    wanted |= {_SINKS for kind in kinds if kind.sinks}
    lacking = wanted and wanted - set(inspect.signature(flash_attn_varlen_func).parameters)
    return f"the installed flash-attn-4 has no argument {min(lacking)}" if lacking else ""


class FlashPrefill:
    """Prefill attention by flash-attn-4 for all rows in one launch, which reads keys and values in place.

    TMA loads whole pages of `_FLASH_PAGE` tokens, and positions after a row's context get a weight of zero. But zero
    times an infinite value or NaN is NaN, and the request that owned the page before may have left such values (after
    an overflow in the model, or a transfer whose checksum did not match). So the values at these positions are zeroed
    before any layer reads them. Pages of other sizes need no zeroing.
    """

    def __init__(self, page_tokens: int, pdl: bool) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        self._flash: Callable[..., Any] = flash_attn_varlen_func
        self._page_tokens = page_tokens
        self._pdl = pdl
        self._sinks: dict[int, tuple[Tensor, Tensor]] = {}

    def compile(
        self,
        kinds: Iterable[AttentionKind],
        dtype: torch.dtype,
        device: torch.device,
        lengths: Iterable[int] = COMPILED_LENGTHS,
    ) -> None:
        """Compile the kernels that layers of these kinds need, for rows of `lengths` tokens."""
        for (shape, has_sinks), tokens in itertools.product(kinds, lengths):
            if not has_flash_kernel(shape):
                continue
            pages, elements = pages_for(tokens, self._page_tokens), self._page_tokens * (shape.head_dim + shape.v_dim)
            planes = torch.zeros(pages, 1, shape.kv_heads, elements, dtype=dtype, device=device)
            cache = kv_view(planes, (shape.head_dim, shape.v_dim), self._page_tokens)
            q = torch.zeros(tokens, shape.heads, shape.head_dim, dtype=dtype, device=device)
            sinks = torch.zeros(shape.heads, device=device) if has_sinks else None
            layer = AttentionLayer(0, shape, rope=q, sinks=sinks)  # rope is not read: q and k are rotated already
            self(q, layer, cache, one_prompt(tokens, pages, device), 0)

    def begin_step(self, cache: KvCache, layout: StepLayout, first_row: int) -> None:
        """Zero the values after each row's context in the row's last page, if TMA loads whole pages."""
        if self._page_tokens == _FLASH_PAGE and value_dim(cache) <= max(_FLASH_DIMS):
            clear_value_tails(cache, layout, first_row, pdl=self._pdl)

    def __call__(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout, first_row: int) -> Tensor:
        """Compute the attention of all rows from `first_row` on in one launch.

        SDPA computes layers of other head dimensions, and of chunks, which flash-attn-4 lacks, if a context may be
        longer than a chunk.
        """
        longer = layer.shape.chunk is not None and layout.max_context > layer.shape.chunk
        if longer or not has_flash_kernel(layer.shape):
            return SdpaPrefill()(q, layer, cache, layout, first_row)
        shape, special = layer.shape, dict[str, Any]()
        keys, values = (unquantized(layer_part(cache, layer.index, part)) for part in range(2))
        if shape.softcap is not None:
            special[_SOFTCAP] = shape.softcap
        if layer.sinks is not None:
            special[_SINKS] = self._rounded(layer.sinks)
        out = self._flash(
            q,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            cu_seqlens_q=layout.row_starts[first_row:],
            max_seqlen_q=layout.max_row_tokens,
            seqused_k=layout.context_lens[first_row:],
            page_table=layout.page_table[first_row:],
            softmax_scale=shape.scale,
            causal=True,
            window_size=(None if shape.window is None else shape.window - 1, None if shape.window is None else 0),
            **special,
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def _rounded(self, sinks: Tensor) -> Tensor:
        """Return a layer's sinks in bfloat16, the only dtype that flash-attn-4 takes; each tensor is rounded once.

        Sinks that are rounded while a CUDA graph is captured are not cached, because their memory belongs to that
        graph.
        """
        key = sinks.data_ptr()
        if key in self._sinks:
            return self._sinks[key][1]
        rounded = sinks.bfloat16()
        if not (sinks.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._sinks[key] = sinks, rounded  # the original is kept too, so that no other tensor gets its address
        return rounded


class SdpaPrefill:
    """Prefill attention by PyTorch's SDPA, row by row, over a copy of each row's keys and values.

    It synchronizes with the device to read the lengths of the rows. Soft caps and sinks, which SDPA does not support,
    are computed by plain PyTorch operations. Pages before a row's window are not read, because they may belong to other
    requests.
    """

    def begin_step(self, cache: KvCache, layout: StepLayout, first_row: int) -> None:
        """Do nothing, because only positions within a row's context are read."""

    def __call__(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout, first_row: int) -> Tensor:
        """Compute attention row by row, with a bounded number of scores at a time."""
        shape, starts, contexts = layer.shape, layout.row_starts.tolist(), layout.context_lens.tolist()
        out = q.new_empty(len(q), shape.heads, shape.v_dim)
        for row in range(first_row, len(contexts)):
            first = first_read(contexts[row], starts[row + 1] - starts[row], shape, cache.shape[4])
            keys, values = gather_row(cache, layer.index, layout.page_table[row], contexts[row], first, q.dtype)
            at_once = max(1, _SDPA_SCORES // (shape.heads * keys.shape[1]))
            for start in range(starts[row], starts[row + 1], at_once):
                here = slice(start, min(start + at_once, starts[row + 1]))
                positions = layout.positions[here]
                if shape.softcap is None and layer.sinks is None:
                    out[here] = _sdpa(q[here], keys, values, positions, shape, first)
                else:
                    out[here] = attend(q[here], keys, values, positions, shape, layer.sinks, first)
        return out


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, shape: AttentionShape, first: int) -> Tensor:
    """Compute the same as `reference.attend`, for layers with neither a soft cap nor sinks."""
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=visible(positions, range(first, first + keys.shape[1]), shape)[None, None],
        scale=shape.scale,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1)


def one_prompt(tokens: int, pages: int, device: torch.device) -> StepLayout:
    """Return the layout of a step with one new prompt on pages 0, 1, …."""

    def numbers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepLayout(
        positions=numbers(*range(tokens)),
        slots=numbers(*range(tokens), dtype=torch.int64),
        row_starts=numbers(0, tokens),
        context_lens=numbers(tokens),
        page_table=numbers(*range(pages)).view(1, pages),
        max_row_tokens=tokens,
        max_context=tokens,
    )
