"""The cases of every prefill attention: fresh random steps on shuffled pages, NaN in all unwritten memory."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.kernels.attention.prefill_attention import PrefillAttention
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.layers import AttentionLayer
from tandem.engine.kernels.reference import ReferenceKernels

from .steps import Step, assert_as_good, heads

REFERENCE = ReferenceKernels()
LENGTHS = (1, 127, 128, 129)
LONG = 4097
SHAPES = {
    "gqa": heads(6, 2, 64),
    "mqa": heads(4, 1, 128),
    "mha": heads(2, 2, 64),
    "narrow window": heads(4, 2, 64, window=5),
    "window": heads(4, 2, 128, window=100),
    "chunks": replace(heads(4, 2, 128), chunk=100),
}
PROMPTS = {f"prompt of {length}": [(length, length)] for length in LENGTHS}
CACHED = {f"{length} more on {cached}": [(length, cached + length)] for length in LENGTHS for cached in (1, 128, 300)}
BATCHES = {
    "three prompts": [(129, 129), (1, 1), (127, 127)],
    "three chunks": [(17, 317), (128, 129), (1, 4)],
    "a chunk among prompts": [(128, 128), (60, 500), (3, 3)],
}
"""Rows of (tokens, context with them), by name."""
ROWS = PROMPTS | CACHED | BATCHES


def to_device(layout: StepLayout, device: torch.device) -> StepLayout:
    tensors = {
        name: getattr(layout, name).to(device)
        for name in ("positions", "slots", "row_starts", "context_lens", "page_table")
    }
    return StepLayout(
        **tensors,
        max_row_tokens=layout.max_row_tokens,
        max_context=layout.max_context,
        single_rows=layout.single_rows,
    )


def run(
    attention: PrefillAttention,
    step: Step,
    dtype: torch.dtype,
    device: torch.device,
    *,
    first_row: int = 0,
    cache: Tensor | None = None,
) -> Tensor:
    """Runs the rows from `first_row` on: [T, heads · head_dim] on the CPU."""
    layout = to_device(step.layout, device)
    q = step.q.to(device, dtype)
    held = (step.cache if cache is None else cache).to(device, dtype)
    attention.begin_step(held, layout, first_row)
    out = attention(q, _layer(step, device), held, layout, first_row)[int(step.layout.row_starts[first_row]) :]
    assert out.dtype == dtype
    return out.flatten(1).cpu()


def torch_of(step: Step, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Runs PyTorch's plain operations in `dtype`."""
    q, cache = step.q.to(device, dtype), step.cache.to(device, dtype)
    return REFERENCE.attention(q, _layer(step, device), cache, to_device(step.layout, device)).cpu()


def _layer(step: Step, device: torch.device) -> AttentionLayer:
    return replace(step.layer, sinks=None if step.sinks is None else step.sinks.to(device))


def check(
    attention: PrefillAttention, step: Step, dtype: torch.dtype, device: torch.device, cache: Tensor | None = None
) -> None:
    """Checks that the error is at most twice that of PyTorch in the same dtype, both against float64."""
    exact = torch_of(step, torch.float64, device)
    assert_as_good(run(attention, step, dtype, device, cache=cache), torch_of(step, dtype, device), exact)
