"""Plans of decode attention: which are worth measuring, and seconds of one call by one of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.ceilings import graph_seconds
from engine.kernels.base import AttentionShape
from engine.kernels.triton_attention import DecodeAttention, Plan

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE_TOKENS = 128
LEAST_CACHE_BYTES = 400e6
"""Several times the L2 cache: what a graph's calls read before they come back to the first layer."""
COMPILERS = 16
TILES = [
    (64, 4, 3),
    (64, 4, 4),
    (64, 4, 2),
    (32, 4, 4),
    (32, 4, 6),
    (32, 2, 4),
    (128, 4, 2),
    (128, 4, 3),
    (128, 8, 3),
    (64, 2, 3),
]
"""Tokens, warps, stages."""
SPLITS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
PROGRAMS_PER_SM = (0.9, 20)
"""Fewest and most programs worth a try."""
_SIGMA = 0.8
"""Of the logarithm of uneven lengths."""
TOLERANCE = 0.02
"""How far apart two plans' results may lie, in absolute terms: results are averages of numbers around 1."""


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of `context` tokens each, and the heads that attend to them."""

    rows: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.context} h{self.heads}/{self.kv_heads} d{self.head_dim}"

    @property
    def bytes(self) -> int:
        """Keys and values that one call reads."""
        return 2 * self.rows * self.context * self.kv_heads * self.head_dim * DTYPE.itemsize

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Inputs:
    q: Tensor
    cache: Tensor
    table: Tensor
    contexts: Tensor


def make_inputs(size: Size) -> Inputs:
    """Random keys and values on shuffled pages, in as many layers as it takes to outgrow L2."""
    columns = -(-size.context // PAGE_TOKENS)
    pages = size.rows * columns
    layers = max(2, round(LEAST_CACHE_BYTES / size.bytes))
    cache = torch.empty(
        pages, layers, 2, size.kv_heads, PAGE_TOKENS, size.head_dim, dtype=DTYPE, device=DEVICE
    ).normal_()
    return Inputs(
        q=torch.randn(size.rows, size.heads, size.head_dim, dtype=DTYPE, device=DEVICE),
        cache=cache,
        table=torch.randperm(pages, device=DEVICE).int().view(size.rows, columns),
        contexts=torch.full((size.rows,), size.context, dtype=torch.int32, device=DEVICE),
    )


def uneven(rows: int, mean: int) -> list[int]:
    """Lengths of `rows` rows, at evenly spread ranks of a lognormal distribution."""
    ranks = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    lengths = torch.exp(_SIGMA * torch.special.ndtri(ranks))
    return [max(1, round(length)) for length in (lengths * mean / lengths.mean()).tolist()]


def rank(plans: Sequence[Plan], size: Size, inputs: Inputs) -> list[tuple[float, Plan]]:
    """Seconds of each plan, the fastest first; a plan that computes something else than the first is left out."""
    expected = None
    ranked = []
    for plan in plans:
        result = _attention(plan, size)(inputs.q, inputs.cache, 0, inputs.table, inputs.contexts)
        expected = result if expected is None else expected
        error = (result.float() - expected.float()).abs().max().item()
        if error < TOLERANCE:
            ranked.append((measure(plan, size, inputs), plan))
        else:
            print(f"WRONG by {error}: {size.name} {plan}")
    return sorted(ranked, key=lambda timing: timing[0])


def measure(plan: Plan, size: Size, inputs: Inputs, pdl: bool = False, early: bool = False) -> float:
    """Seconds of one call among others in a graph."""
    attention = _attention(plan, size, pdl, early)
    layers = inputs.cache.shape[1]

    def call(layer: int) -> None:
        attention(inputs.q, inputs.cache, layer, inputs.table, inputs.contexts)

    return graph_seconds(call, layers)


def in_parallel(variants: Sequence[tuple[Plan, Size, bool, bool]]) -> None:
    """Compile plans (with size, overlap, early reading) by running each once on one short row."""

    def run(variant: tuple[Plan, Size, bool, bool]) -> None:
        plan, size, pdl, early = variant
        small = Size(1, PAGE_TOKENS, size.heads, size.kv_heads, size.head_dim)
        attention = DecodeAttention(small.shape, 1, DEVICE, pdl, early, _always(plan))
        cache = torch.zeros(1, 1, 2, size.kv_heads, PAGE_TOKENS, size.head_dim, dtype=DTYPE, device=DEVICE)
        q = torch.zeros(1, size.heads, size.head_dim, dtype=DTYPE, device=DEVICE)
        table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        attention(q, cache, 0, table, torch.zeros(1, dtype=torch.int32, device=DEVICE))

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(run, variants))
    torch.cuda.synchronize()


def _attention(plan: Plan, size: Size, pdl: bool = False, early: bool = False) -> DecodeAttention:
    return DecodeAttention(size.shape, size.rows, DEVICE, pdl, early, _always(plan))


def _always(plan: Plan) -> Callable[..., Plan]:
    return lambda *_: plan


def tiles() -> list[Plan]:
    return [Plan(block, warps, stages, splits=1, least_tiles=1) for block, warps, stages in TILES]


def plans(size: Size) -> list[Plan]:
    """Every tile with every number of splits that neither leaves the GPU idle nor drowns it in programs."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    fewest, most = (bound * sms for bound in PROGRAMS_PER_SM)
    plans = []
    for block, warps, stages in TILES:
        for splits in SPLITS:
            programs = size.rows * size.kv_heads * splits
            enough = programs >= fewest or splits * block >= size.context
            if (splits == 1 or programs <= most) and enough and splits * block <= size.context:
                plans.append(Plan(block, warps, stages, splits, least_tiles=1))
    return plans
