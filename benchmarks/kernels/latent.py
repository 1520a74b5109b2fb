"""Measures latent attention: `python -m benchmarks.kernels latent [--plans]`.

Decode attention over DeepSeek's latents is compared with an on-device copy of the same run: the bytes of the latents
over the time, as a share of the copy's bandwidth. `attention` is flash-decoding with its merge alone; `whole` includes
the products before and after it, as a layer computes them. Prompts use the expanded form and are given as a share of
the matrix rate, counting the operations of causal attention and of computing keys and values. Activations are random
bfloat16. `--plans` also ranks other tiles of decode attention.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.command_line import Measured
from benchmarks.gpu_timing import copy_bandwidth, graph_seconds, matrix_rate, median_seconds
from benchmarks.results import run_facts
from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.latent.absorbed import AbsorbedAttention
from tandem.engine.kernels.latent.absorbed_plan import Plan, PlanFunction, make_plan
from tandem.engine.kernels.latent.block_attention import BlockAttention, choose_block_attention, compiled
from tandem.engine.kernels.latent.latent_kernels import LatentKernels
from tandem.engine.kernels.latent.triton_products import absorb
from tandem.engine.kernels.layers import LatentLayer, Norm
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.protocol.ending import pages_for
from tandem.settings.engine import GPU_PAGE_TOKENS as PAGE_TOKENS

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LEAST_CACHE_BYTES = 400e6
"""Approximate KV bytes of all layers through which the calls of a graph rotate: several times the L2 cache."""
_COMPILERS = 16
_TOLERANCE = 0.02
"""Tolerated absolute difference between the results of two plans; results are averages of numbers around 1."""


@dataclass(frozen=True, slots=True)
class Size:
    """A decode step of `rows` rows with `context` tokens each."""

    rows: int
    context: int
    shape: LatentShape

    @property
    def bytes(self) -> int:
        """Bytes of latents that one call reads."""
        return self.rows * self.context * self.shape.cached * DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call."""

    q: Tensor
    kv_up: Tensor
    cache: Tensor
    table: Tensor
    contexts: Tensor
    out: Tensor


def make_inputs(size: Size) -> Inputs:
    """Return random latents on shuffled pages, with enough layers to exceed L2."""
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


def call_seconds(size: Size, inputs: Inputs, choose: PlanFunction = make_plan) -> tuple[float, float]:
    """Return the seconds per call in one CUDA graph, first with and then without the surrounding products."""
    attention = begun(size, inputs, choose)
    layers = inputs.cache.shape[1]
    absorbed = absorb(inputs.q, inputs.kv_up, size.shape, pdl=False)

    def whole(number: int) -> None:
        attention(inputs.q, inputs.kv_up, inputs.cache, number % layers, inputs.out)

    def mixing(number: int) -> None:
        attention.mix(absorbed, inputs.cache, number % layers)

    return graph_seconds(whole, 2 * layers), graph_seconds(mixing, 2 * layers)


def rank(size: Size, inputs: Inputs, plans: Sequence[Plan]) -> list[tuple[float, Plan]]:
    """Return the plans with their seconds of `mix`, fastest first.

    A plan that needs too much shared memory, or whose results differ from those of the engine's plan, is printed and
    left out.
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
            ranked.append((call_seconds(size, inputs, _always(plan))[1], plan))
    return sorted(ranked, key=lambda timing: timing[0])


def begun(size: Size, inputs: Inputs, choose: PlanFunction = make_plan) -> AbsorbedAttention:
    """Return an absorbed attention prepared for a step of these rows."""
    made = AbsorbedAttention(size.shape, 1, DEVICE, DTYPE, overlaps_launches(), choose)
    made.begin_step(inputs.cache, inputs.table, inputs.contexts)
    return made


def candidates(rows: int) -> list[Plan]:
    """Return the plans to compare for tiles of `rows` rows."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    tiles = [(16, 4, 3), (32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3)]
    return [
        Plan(rows, tokens, warps, stages, programs * sms)
        for tokens, warps, stages in tiles
        for programs in ((1,) if rows == 64 else (1, 2, 3))
    ]


def _always(plan: Plan) -> PlanFunction:
    return lambda *_: plan


LITE = LatentShape(heads=16, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5)
"""The shape of DeepSeek-V2-Lite."""
LARGE = LatentShape(heads=128, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5)
"""The shape of DeepSeek-V3."""
DECODE = ((LITE, 64, 4096), (LITE, 1, 32768), (LITE, 128, 4096), (LARGE, 64, 4096))
"""(shape, rows, context)."""
PROMPTS = ((0, 2048), (0, 8192), (8192, 2048), (8192, 128))
"""(cached tokens of the prompt, tokens of its chunk)."""

Figures = dict[str, object]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--plans", action="store_true", help="rank other tiles of decode attention")


def measure(options: argparse.Namespace) -> Measured:
    """Measure all sizes."""
    started = time.monotonic()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s", flush=True)
    result: Figures = {"copy_gb_per_s": round(copy / 1e9, 1)} | _decode(copy, rank_plans=options.plans) | _prompts()
    seconds = round(time.monotonic() - started, 1)
    return "latent-attention", result | {"seconds": seconds, "dtype": "bfloat16", **run_facts("cuda")}


def _decode(copy: float, *, rank_plans: bool) -> Figures:
    figures: Figures = {}
    for shape, rows, context in DECODE:
        size = Size(rows, context, shape)
        inputs = make_inputs(size)
        whole, alone = call_seconds(size, inputs)
        name = f"{rows}x{context}_h{shape.heads}"
        figures |= {
            f"latent_bw_ratio_{name}": round(size.bytes / alone / copy, 4),
            f"latent_whole_bw_ratio_{name}": round(size.bytes / whole / copy, 4),
            f"latent_us_{name}": round(alone * 1e6, 2),
            f"latent_whole_us_{name}": round(whole * 1e6, 2),
        }
        print(
            f"decode {name:16} attention {alone * 1e6:8.1f} us {size.bytes / alone / copy:6.1%} of copy,"
            f" whole {whole * 1e6:8.1f} us {size.bytes / whole / copy:6.1%}",
            flush=True,
        )
        for seconds, plan in rank(size, inputs, candidates(16 if shape is LITE else 64)) if rank_plans else []:
            print(f"  {seconds * 1e6:8.1f} us {size.bytes / seconds / copy:6.1%} {plan}", flush=True)
    return figures


def _prompts() -> Figures:
    """Measure a layer's attention for one chunk.

    If launching its kernels takes longer than running them, the time is that of the launches.
    """
    matrix = matrix_rate()
    figures: Figures = {"matrix_tflops": round(matrix / 1e12, 1)}
    for cached, tokens in PROMPTS:
        seconds, implementation = _prompt_seconds(LITE, cached, tokens)
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        expanded = (cached + tokens) * LITE.latent * (LITE.nope + LITE.v_dim)
        flop = 2 * LITE.heads * (pairs * (LITE.query + LITE.v_dim) + expanded)
        name = f"{tokens}_behind_{cached}"
        figures |= {
            f"latent_prefill_us_{name}": round(seconds * 1e6, 1),
            f"latent_prefill_flops_ratio_{name}": round(flop / seconds / matrix, 4),
            "latent_prefill": implementation,
        }
        print(f"prompt {name:18} {seconds * 1e6:8.1f} us {flop / seconds / matrix:6.1%} of the matrix rate", flush=True)
    print(f"prompts by {figures['latent_prefill']}")
    return figures


def _prompt_seconds(shape: LatentShape, cached: int, tokens: int) -> tuple[float, str]:
    """Return the seconds of a layer's attention for one chunk, and the name of the implementation for long chunks."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    blocks: Future[BlockAttention] = Future()
    blocks.set_result(compiled(choose_block_attention(device, dtype, [shape]), [shape], dtype, device))
    kernels = LatentKernels([shape], (), device, dtype, overlaps_launches(), blocks)
    context = cached + tokens
    pages = -(-context // PAGE_TOKENS)
    position = torch.arange(context, device=device)
    layout = StepLayout(
        positions=position[cached:].int(),
        slots=position[cached:],
        row_starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([context], dtype=torch.int32, device=device),
        page_table=torch.arange(pages, dtype=torch.int32, device=device).view(1, pages),
        max_row_tokens=tokens,
        max_context=context,
        max_cached=cached,
    )
    cache = torch.randn(pages, 1, 1, 1, PAGE_TOKENS, shape.cached, dtype=dtype, device=device)
    q = torch.randn(tokens, shape.heads, shape.query, dtype=dtype, device=device)
    kv_up = torch.randn(shape.heads, shape.nope + shape.v_dim, shape.latent, dtype=dtype, device=device)
    kv_up /= shape.latent**0.5
    kernels.begin_step(cache, layout, 0)
    empty = torch.empty(0, dtype=dtype, device=device)
    layer = LatentLayer(0, shape, empty, Norm(empty, 0.0), kv_up)  # the attention uses neither RoPE nor the norm
    seconds = median_seconds(lambda: kernels.attention(q, layer, cache, layout, 0))
    return seconds, type(blocks.result()).__name__
