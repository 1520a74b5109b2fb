"""Measures decode attention with different plans: `python -m benchmarks.kernels attention [--quick]`.

`--kv-cache-dtype int8` measures attention over 8-bit keys and values.

Every plan of a short list is measured at every size, in a CUDA graph whose calls read more KV than L2 holds. The sizes
have rows of equal length, of lognormal lengths as in conversations, and one long row among short ones. Figures are KV
bytes over time, as shares of the copy bandwidth measured in the same run.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from benchmarks.command_line import Measured
from benchmarks.gpu_timing import copy_bandwidth, graph_seconds
from benchmarks.results import run_facts
from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.attention.triton_attention_plan import (
    CODE_TILES,
    LARGE_TILE,
    NARROW_TILE,
    ROUNDS_TILE,
    SMALL_TILE,
    Plan,
    PlanFunction,
    make_plan,
)
from tandem.engine.kernels.kv_cache import SCALE_BYTES, KvCache, QuantizedKv, is_quantized
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.models.shapes import shape_config, shape_names
from tandem.protocol.ending import pages_for
from tandem.settings.engine import GPU_PAGE_TOKENS as PAGE_TOKENS

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LEAST_CACHE_BYTES = 400e6
"""Approximate KV bytes of all layers through which the calls of a graph rotate: several times the L2 cache."""
COMPILERS = 16
TILES = [
    SMALL_TILE,
    NARROW_TILE,
    ROUNDS_TILE,
    Plan(block_tokens=64, warps=4, stages=4),
    LARGE_TILE,
]
TILES_OF_CODES = [
    *dict.fromkeys(replace(tile, shared_percent=0) for tile in CODE_TILES.values()),
    CODE_TILES[SMALL_TILE],
    CODE_TILES[ROUNDS_TILE],
    Plan(block_tokens=64, warps=2, stages=4),
    Plan(block_tokens=64, warps=4, stages=4),
    Plan(block_tokens=128, warps=4, stages=2),
    Plan(block_tokens=128, warps=4, stages=4),
    Plan(block_tokens=128, warps=8, stages=3),
]
SPLITS = [8, 16, 24, 32, 48, 64]
"""Numbers of splits to try for a single row."""
PER_SM = (2, 3, 4)
"""Numbers of programs per multiprocessor to try; each program processes several rows."""
_SIGMA = 0.8
"""Standard deviation of the logarithm of uneven lengths."""
_TOLERANCE = 0.02
"""Tolerated absolute difference between the results of two plans; results are averages of numbers around 1."""


@dataclass(frozen=True, slots=True)
class Size:
    """One workload: the lengths of a step's rows in tokens, the attention shape, and the dtype of the cache."""

    name: str
    lengths: tuple[int, ...]
    shape: AttentionShape
    kv_dtype: torch.dtype = DTYPE

    @property
    def bytes(self) -> int:
        """Bytes of KV that one call reads, including scales."""
        seen = sum(min(length, self.shape.window or length) for length in self.lengths)
        return 2 * seen * self.shape.kv_heads * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys, or of the values, of one token and head."""
        scale = SCALE_BYTES if is_quantized(self.kv_dtype) else 0
        return self.shape.head_dim * self.kv_dtype.itemsize + scale


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one attention call."""

    q: Tensor
    cache: KvCache
    table: Tensor
    contexts: Tensor


def make_inputs(size: Size) -> Inputs:
    """Return random KV on shuffled pages, with enough layers to exceed L2."""
    shape, rows = size.shape, len(size.lengths)
    held = [pages_for(length, PAGE_TOKENS) for length in size.lengths]
    layers = max(2, round(LEAST_CACHE_BYTES / size.bytes))
    table = torch.zeros(rows, max(held), dtype=torch.int32)
    for row, pages in enumerate(torch.split_with_sizes(torch.randperm(sum(held)), held)):
        table[row, : len(pages)] = pages
    return Inputs(
        q=torch.randn(rows, shape.heads, shape.head_dim, dtype=DTYPE, device=DEVICE),
        cache=_random_cache(size, sum(held), layers),
        table=table.to(DEVICE),
        contexts=torch.tensor(size.lengths, dtype=torch.int32, device=DEVICE),
    )


def _random_cache(size: Size, pages: int, layers: int) -> KvCache:
    """Return a cache of random numbers, or of random codes with small scales."""
    shape = size.shape
    outer = (pages, layers, 2, shape.kv_heads)
    if not is_quantized(size.kv_dtype):
        return torch.empty(*outer, PAGE_TOKENS, shape.head_dim, dtype=size.kv_dtype, device=DEVICE).normal_()
    memory = torch.empty(*outer, PAGE_TOKENS * size.row_bytes, dtype=size.kv_dtype, device=DEVICE)
    codes, scales = memory.tensor_split([PAGE_TOKENS * shape.head_dim], dim=-1)
    cache = QuantizedKv(codes.view(*outer, PAGE_TOKENS, shape.head_dim), scales.view(torch.float32))
    # Bytes below 120 are valid numbers of both 8-bit types.
    memory.view(torch.int8).random_(-119, 120) if size.kv_dtype == torch.int8 else memory.view(torch.uint8).random_(120)
    cache.scales.uniform_(0.01, 0.02)
    return cache


def uneven(rows: int, mean: int) -> tuple[int, ...]:
    """Return `rows` lengths at evenly spaced quantiles of a lognormal distribution."""
    ranks = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    lengths = torch.exp(_SIGMA * torch.special.ndtri(ranks))
    return tuple(max(1, round(length)) for length in (lengths * mean / lengths.mean()).tolist())


def rank(plans: Sequence[Plan], size: Size, inputs: Inputs) -> list[tuple[float, Plan]]:
    """Return the plans with their seconds, fastest first.

    Plans whose results differ from the first one's are left out.
    """
    expected = None
    ranked = []
    for plan in plans:
        result = _begun(size, inputs, always(plan))(inputs.q, inputs.cache, 0, inputs.table, inputs.contexts)
        expected = result if expected is None else expected
        error = (result.float() - expected.float()).abs().max().item()
        if error < _TOLERANCE:
            ranked.append((call_seconds(size, inputs, always(plan)), plan))
        else:
            print(f"WRONG by {error}: {size.name} {plan}")
    return sorted(ranked, key=lambda timing: timing[0])


def call_seconds(size: Size, inputs: Inputs, choose: PlanFunction = make_plan) -> float:
    """Return the seconds per call, measured over many calls in one CUDA graph."""
    attention = _begun(size, inputs, choose)
    layers = inputs.cache.shape[1]

    def call(number: int) -> None:
        attention(inputs.q, inputs.cache, number % layers, inputs.table, inputs.contexts)

    return graph_seconds(call, 2 * layers)


def in_parallel(sizes: Sequence[Size]) -> None:
    """Compile the plans of these sizes in parallel, by running each once on short rows."""
    variants = {
        (size.shape, size.kv_dtype, replace(plan, units=min(plan.units, 1), splits=1))
        for size in sizes
        for plan in plans(size)
    }

    def run(variant: tuple[AttentionShape, torch.dtype, Plan]) -> None:
        shape, kv_dtype, plan = variant
        small = Size("", (1, 1), shape, kv_dtype)
        cache = _random_cache(small, 1, 1)
        q = torch.zeros(2, shape.heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
        none = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
        inputs = Inputs(q, cache, none, none[:, 0])
        _begun(small, inputs, always(plan))(q, cache, 0, none, inputs.contexts)

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(run, variants))
    torch.cuda.synchronize()


def always(plan: Plan) -> PlanFunction:
    """Return a substitute for `make_plan` that always chooses `plan`."""
    return lambda *_: plan


def own_plan(size: Size) -> Plan:
    """Return the plan that the engine would choose."""
    shape, sms = size.shape, _multiprocessors()
    return make_plan(len(size.lengths), shape.kv_heads, shape.head_dim, max(size.lengths), size.kv_dtype, sms)


def plans(size: Size) -> list[Plan]:
    """Return the candidate plans, the engine's first.

    For several rows, each tile is tried with as many programs as can run at the same time, and with multiples of the
    number of rows.
    """
    rows, kv_heads, sms = len(size.lengths), size.shape.kv_heads, _multiprocessors()
    tiles = TILES_OF_CODES if is_quantized(size.kv_dtype) else TILES
    own = own_plan(size)
    if rows == 1:
        tried = [replace(tile, splits=splits) for tile in tiles for splits in SPLITS]
    else:
        counts = {per_sm * sms // kv_heads for per_sm in PER_SM}
        counts |= {count // rows * rows for count in counts if count >= rows}
        tried = [replace(tile, units=units) for tile in tiles for units in sorted(counts)]
    return [own, *(plan for plan in tried if plan != own)]


def _begun(size: Size, inputs: Inputs, choose: PlanFunction) -> DecodeAttention:
    """Return a decode attention prepared for a step of these rows."""
    made = DecodeAttention(
        size.shape, len(size.lengths), DEVICE, DTYPE, overlaps_launches(), choose=choose, kv_dtype=size.kv_dtype
    )
    made.begin_step(inputs.cache, inputs.table, inputs.contexts)
    return made


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


KV_DTYPES = {"bfloat16": DTYPE, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
MODELS = ("llama-3-8b", "qwen3-0.6b", "llama-3.2-1b")
EQUAL = ((1, 1024), (1, 32768), (8, 1024), (12, 2048), (32, 1024), (64, 2048), (128, 1024), (128, 4096), (256, 1024))
"""(rows, context of each row)."""
UNEVEN = ((4, 2048), (12, 2048), (24, 2048), (33, 2048), (44, 2048), (128, 2048), (256, 1024))
"""(rows, mean context)."""
LONG = ((12, 32768, 1024), (128, 32768, 1024))
"""(rows, context of one row, context of every other row)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--models", nargs="+", choices=shape_names(), default=list(MODELS), help="whose heads")
    parser.add_argument("--rows", nargs="+", type=int, default=[], help="only sizes with these numbers of rows")
    parser.add_argument("--sizes", nargs="+", default=[], help="only sizes of these names, e.g. 64x2048")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="bfloat16", help="(bfloat16)")
    parser.add_argument("--quick", action="store_true", help="only what the engine's own plan gives")


def measure(options: argparse.Namespace) -> Measured:
    """Measure all sizes."""
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s")
    sizes = [
        size
        for size in sizes_of(options.models, KV_DTYPES[options.kv_cache_dtype])
        if (not options.rows or len(size.lengths) in options.rows)
        and (not options.sizes or size.name.split(" h")[0] in options.sizes)
    ]
    results = tune(sizes, copy, options.quick)
    facts = {"models": options.models, "dtype": options.kv_cache_dtype, **run_facts("cuda")}
    return "tune-attention", {"copy_gb_per_s": copy / 1e9, "attention": results, **facts}


def sizes_of(models: Sequence[str], kv_dtype: torch.dtype = DTYPE) -> list[Size]:
    """Return every workload with the heads of each model; models with equal heads count once."""
    shapes = dict.fromkeys(shape for name in models for shape in shape_config(name).attention_shapes)
    lengths = {f"{rows}x{context}": (context,) * rows for rows, context in EQUAL}
    lengths |= {f"{rows}x{mean} uneven": uneven(rows, mean) for rows, mean in UNEVEN}
    lengths |= {f"{rows}x{rest} and {long}": (*(rest,) * (rows - 1), long) for rows, long, rest in LONG}
    return [
        Size(f"{name} h{shape.heads}/{shape.kv_heads} d{shape.head_dim}", row_lengths, shape, kv_dtype)
        for shape in shapes
        for name, row_lengths in lengths.items()
    ]


def tune(sizes: Sequence[Size], copy: float, quick: bool) -> dict[str, object]:
    """Measure and print every size, and return the results as JSON.

    `copy` is the copy bandwidth in bytes per second.
    """
    if not quick:
        in_parallel(sizes)
    return {size.name: _tune_one(size, copy, quick) for size in sizes}


def _tune_one(size: Size, copy: float, quick: bool) -> dict[str, object]:
    own = own_plan(size)
    ranked = rank([own] if quick else plans(size), size, make_inputs(size))
    shares = [(round(size.bytes / seconds / copy, 4), plan) for seconds, plan in ranked]
    share_of_own = next(share for share, plan in shares if plan == own)
    best = ", ".join(f"{share:.3f} {_brief(plan)}" for share, plan in shares[:4])
    print(f"{size.name:36} engine {share_of_own:.3f} {_brief(own)}; {best}", flush=True)
    return {
        "engine": asdict(own),
        "engine_share": share_of_own,
        "engine_microseconds": round(size.bytes / share_of_own / copy * 1e6, 2),
        "shares": {_brief(plan): share for share, plan in shares},
    }


def _brief(plan: Plan) -> str:
    cut = f"{plan.units} units" if plan.units else f"{plan.splits} splits"
    return f"{plan.block_tokens}/{plan.warps}/{plan.stages} {cut}"
