"""Random state layers and steps for kernel tests."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConvolution, StateLayer
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import Norm, RecurrentLayer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES, LAYERS, LAYER = 8, 2, 1
LAST = PAGES - 1
"""The page of no request, to which the reference writes the states of padding rows."""
SPECS: dict[str, StateLayer] = {
    "delta": GatedDeltaNet(2, 4, 16, 8, 4, 1e-6),
    "delta of odd sizes": GatedDeltaNet(3, 3, 24, 48, 2, 1e-5, step_scale=2.0),
    "kimi": KimiDeltaAttention(2, 16, 8, 4, 1e-6),
    "kimi of odd sizes": KimiDeltaAttention(3, 24, 4, 3, 1e-5),
    "mamba": Mamba2(8, 8, 2, 16, 4, 1e-5, norm_groups=2),
    "mamba of odd sizes": Mamba2(6, 12, 3, 24, 3, 1e-6, convolution_bias=False, least_step=0.4),
    "convolution": ShortConvolution(24, 3, 2, bias=True),
    "wide convolution": ShortConvolution(300, 4, 1),
}
Row = tuple[int, int, int]
"""A row's tokens, the page that it reads (-1: none), and the page that it writes (-1: the row is padding)."""


def random(*shape: int, seed: int) -> Tensor:
    """Returns float64 numbers that bfloat16 holds exactly, so that every dtype starts from the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double().to(DEVICE)


def make_layer(spec: StateLayer, dtype: torch.dtype) -> RecurrentLayer:
    channels = spec.state.heads * spec.state.channels
    wide = torch.promote_types(dtype, torch.float32)
    biased = (isinstance(spec, Mamba2) and spec.convolution_bias) or (isinstance(spec, ShortConvolution) and spec.bias)
    layer = RecurrentLayer(
        LAYER,
        spec,
        random(channels, spec.width, seed=1).to(dtype) / 2,
        random(channels, seed=8).to(dtype) if biased else None,
        None,
        None,
        None,
        None,
    )
    if isinstance(spec, ShortConvolution):
        return layer
    heads = spec.state.heads * spec.state.state[0]
    steps = spec.inner if isinstance(spec, KimiDeltaAttention) else heads
    norm = spec.inner if isinstance(spec, Mamba2) else spec.state.state[2]
    return replace(
        layer,
        decay_log=random(heads, seed=2).to(wide),
        step_bias=random(steps, seed=3).to(wide),
        skip=random(heads, seed=9).to(wide) if isinstance(spec, Mamba2) else None,
        norm=Norm(random(norm, seed=4).to(dtype), spec.norm_eps),
    )


def make_cache(spec: StateLayer, dtype: torch.dtype) -> StateCache:
    shape, outer = spec.state, (PAGES, LAYERS, spec.state.heads)
    wide = torch.promote_types(dtype, torch.float32)
    states = random(*outer, *shape.state, seed=5).to(wide) if shape.state else None
    return StateCache(states, random(*outer, shape.channels, shape.inputs, seed=6).to(dtype))


def make_inputs(spec: StateLayer, rows: Sequence[Row], dtype: torch.dtype) -> Tensor:
    return random(sum(tokens for tokens, *_ in rows), sum(spec.projected), seed=7).to(dtype)


def make_layout(rows: Sequence[Row]) -> StepLayout:
    counts = [tokens for tokens, *_ in rows]
    zeros = torch.zeros(len(rows), dtype=torch.int32, device=DEVICE)
    return StepLayout(
        positions=torch.zeros(sum(counts), dtype=torch.int32, device=DEVICE),
        slots=torch.zeros(sum(counts), dtype=torch.int64, device=DEVICE),
        row_starts=torch.tensor([0, *counts], device=DEVICE).cumsum(0).int(),
        context_lens=zeros,
        page_table=zeros[:, None],
        max_row_tokens=max(counts),
        max_context=1,
        single_rows=next((number for number, count in enumerate(counts) if count > 1), len(counts)),
        state_pages=torch.tensor([pages for _, *pages in rows], dtype=torch.int32, device=DEVICE),
    )
