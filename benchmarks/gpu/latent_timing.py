"""Inputs and seconds of latent attention's kernels on a GPU.

Calls overlap their neighbours' launches, as in the engine, and take the layers in turn to exceed the caches.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.ceilings import graph_seconds
from tandem.engine.config import GPU_PAGE_TOKENS as PAGE_TOKENS
from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.latent.absorbed import AbsorbedAttention
from tandem.engine.kernels.latent.absorbed_plan import Plan, PlanFunction, make_plan
from tandem.engine.kernels.latent.triton_products import absorb
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.protocol.ending import pages_for

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LEAST_CACHE_BYTES = 400e6
"""Bytes that a graph's calls read before they return to the first layer: several times the L2 cache."""
_COMPILERS = 16
_TOLERANCE = 0.02
"""Allowed absolute difference of two plans' results, which are averages of numbers around 1."""


@dataclass(frozen=True, slots=True)
class Size:
    """A decode step: so many rows of so many tokens."""

    rows: int
    context: int
    shape: LatentShape

    @property
    def bytes(self) -> int:
        """Bytes of latents that one call reads."""
        return self.rows * self.context * self.shape.cached * DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one call."""

    q: Tensor
    kv_up: Tensor
    cache: Tensor
    table: Tensor
    contexts: Tensor
    out: Tensor


def make_inputs(size: Size) -> Inputs:
    """Returns random latents on shuffled pages, with enough layers to exceed L2."""
    shape, held = size.shape, pages_for(size.context, PAGE_TOKENS)
    layers = max(2, round(LEAST_CACHE_BYTES / size.bytes))
    cache = torch.empty(size.rows * held, layers, 1, 1, PAGE_TOKENS, shape.cached, dtype=DTYPE, device=DEVICE).normal_()
    table = torch.randperm(size.rows * held, device=DEVICE).view(size.rows, held)
    kv_up = torch.randn(shape.heads, shape.nope + shape.v_dim, shape.latent, dtype=DTYPE, device=DEVICE)
    return Inputs(
        q=torch.randn(size.rows, shape.heads, shape.query, dtype=DTYPE, device=DEVICE),
        kv_up=kv_up / shape.latent**0.5,
        cache=cache,
        table=table.int(),
        contexts=torch.full((size.rows,), size.context, dtype=torch.int32, device=DEVICE),
        out=torch.empty(size.rows, shape.heads * shape.v_dim, dtype=DTYPE, device=DEVICE),
    )


def measure(size: Size, inputs: Inputs, choose: PlanFunction = make_plan) -> tuple[float, float]:
    """Returns seconds per call among others in a graph: with the products before and after, and without them."""
    attention = begun(size, inputs, choose)
    layers = inputs.cache.shape[1]
    absorbed = absorb(inputs.q, inputs.kv_up, size.shape, pdl=False)

    def whole(number: int) -> None:
        attention(inputs.q, inputs.kv_up, inputs.cache, number % layers, inputs.out)

    def mixing(number: int) -> None:
        attention.mix(absorbed, inputs.cache, number % layers)

    return graph_seconds(whole, 2 * layers), graph_seconds(mixing, 2 * layers)


def rank(size: Size, inputs: Inputs, plans: Sequence[Plan]) -> list[tuple[float, Plan]]:
    """Returns the plans with their seconds of `mix`, fastest first.

    A plan that needs too much shared memory, or whose results differ from the engine's, is left out and named.
    """

    def result(choose: PlanFunction) -> Tensor:
        absorbed = absorb(inputs.q, inputs.kv_up, size.shape, pdl=False)
        return begun(size, inputs, choose).mix(absorbed, inputs.cache, 0)

    expected = result(make_plan)
    with ThreadPoolExecutor(_COMPILERS) as pool:
        tried = [(plan, pool.submit(result, _always(plan))) for plan in plans]
    ranked = []
    for plan, done in tried:
        error = done.exception()
        if error is not None:
            print(f"left out: {plan}: {str(error).splitlines()[0]}")
        elif (difference := (done.result().float() - expected.float()).abs().max().item()) > _TOLERANCE:
            print(f"WRONG by {difference}: {plan}")
        else:
            ranked.append((measure(size, inputs, _always(plan))[1], plan))
    return sorted(ranked, key=lambda timing: timing[0])


def begun(size: Size, inputs: Inputs, choose: PlanFunction = make_plan) -> AbsorbedAttention:
    """Returns absorbed attention prepared for a step of these rows."""
    made = AbsorbedAttention(size.shape, 1, DEVICE, DTYPE, overlaps_launches(), choose)
    made.begin_step(inputs.cache, inputs.table, inputs.contexts)
    return made


def candidates(rows: int) -> list[Plan]:
    """Returns plans to compare for tiles of so many rows."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    tiles = [(16, 4, 3), (32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3)]
    return [
        Plan(rows, tokens, warps, stages, programs * sms)
        for tokens, warps, stages in tiles
        for programs in ((1,) if rows == 64 else (1, 2, 3))
    ]


def _always(plan: Plan) -> PlanFunction:
    return lambda *_: plan
