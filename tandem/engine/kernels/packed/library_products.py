"""PyTorch's FP8 products with a scale per row, or per block of 128 x 128 if this version and device support it."""

import logging
from functools import lru_cache

import torch
from torch import Tensor

from tandem.engine.kernels.fallback import failure_of
from tandem.engine.kernels.packed.scaled_weight import BLOCK, ROW_TILE, QuantizedInput, ScaledWeight

log = logging.getLogger(__name__)


def library_product(x: QuantizedInput, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ + bias [T, N], computed by the library; `uses_library` must be True.

    The bias is added separately: with a bias the library refuses some sizes, such as 65 tokens, 1,536 rows and 14,336
    columns.
    """
    if weight.block_scales is None:
        out = torch._scaled_mm(
            x.codes[: x.tokens], weight.codes.t(), x.scales[0, : x.tokens, None], weight.scales.t(),
            out_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip
    else:
        # All rows of the memory, because the scales are column-major and have that stride.
        out = _block_product(x.codes, x.scales, weight.codes, weight.block_scales, dtype)[: x.tokens]
    return out if bias is None else out.add_(bias)


def _block_product(codes: Tensor, scales: Tensor, weight: Tensor, block_scales: Tensor, dtype: torch.dtype) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    return scaled_mm(
        codes, weight.t(), scales.t(), ScalingType.BlockWise1x128, block_scales, ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )  # fmt: skip


def block_scales(codes: Tensor, scales: Tensor, group: int) -> Tensor | None:
    """Return the scales of a weight [N, K] in the form of `ScaledWeight.block_scales`, or None.

    `scales` is [N, K / group]. Returns None if the library cannot multiply the weight in blocks: the library lacks the
    product, `group` is not BLOCK, or rows of the same block have different scales.
    """
    rows, columns = codes.shape
    if group != BLOCK or group == columns or rows % BLOCK or not codes.is_cuda or codes.dtype == torch.int8:
        return None
    blocks = scales.view(rows // BLOCK, BLOCK, columns // BLOCK)
    if not bool((blocks == blocks[:, :1]).all()):  # for example, a stacked weight whose parts do not end with a block
        return None
    padded = torch.zeros(rows // BLOCK, -(-(columns // BLOCK) // 4) * 4, dtype=torch.float32, device=codes.device)
    padded[:, : columns // BLOCK] = blocks[:, 0]
    return padded.t() if _library_has_blocks(codes.device) else None


@lru_cache(maxsize=8)
def _library_has_blocks(device: torch.device) -> bool:
    """Return True if the library multiplies FP8 in blocks on this device, by trying it with zeros."""
    codes = torch.zeros(ROW_TILE, 4 * BLOCK, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(4, ROW_TILE, device=device)
    blocks = torch.zeros(ROW_TILE // BLOCK, 4, device=device).t()
    failure = failure_of(lambda: _block_product(codes, scales, codes, blocks, torch.bfloat16))
    if failure:
        log.info("FP8 products in blocks are Triton's at every size: %s", failure)
    return not failure
