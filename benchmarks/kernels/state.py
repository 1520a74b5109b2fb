"""Measures state layers alone: `python -m benchmarks.kernels state [--tiles]`.

A layer is measured between its projections, in bfloat16 with random inputs, in CUDA graphs that rotate through more
layers than fit into L2. Decode rows have one token each. "of copy" is the rate at which a step moves its bytes / the
bandwidth of a large device copy in the same run, whose reads and writes both count; the bytes are those of the states
and kept inputs, read and written, of the projections and of the output. Prompts are computed in one row, by the own
kernels, and by fla-core where it is installed and computes the layer; "launched" is without a graph, where the host may
be slower than the device. `--tiles` also measures other tiles of the recurrence.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.command_line import Measured
from benchmarks.gpu_timing import copy_bandwidth, graph_seconds, median_seconds
from benchmarks.results import run_facts
from tandem.engine.cache.paged_cache import state_view
from tandem.engine.config.kv import StateGroup, layer_bytes
from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConvolution, StateLayer
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import Norm, RecurrentLayer
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta, choose_chunked_delta, compiled
from tandem.engine.kernels.states.projections import RowSpan
from tandem.engine.kernels.states.state_kernels import StateKernels
from tandem.engine.kernels.states.triton_recurrence import recur
from tandem.engine.kernels.triton_launch import overlaps_launches

SHAPES: dict[str, StateLayer] = {
    "qwen3-next": GatedDeltaNet(16, 32, 128, 128, 4, 1e-6),
    "kimi-linear-48b": KimiDeltaAttention(32, 128, 128, 4, 1e-5),
    "nemotron-h-8b": Mamba2(128, 64, 8, 128, 4, 1e-5, norm_groups=8),
    "lfm2": ShortConvolution(2048, 3, 8),
}
ROWS = (1, 8, 32, 128, 256)
PROMPTS = (2048, 8192)
SHORT_PROMPTS = (8, 16, 32, 64, 128)
"""Lengths around that from which rows are computed in chunks."""
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
LEAST_BYTES = 400e6
"""Approximate bytes of the states through which the launches of a graph rotate: several times the L2 cache."""
_MOST_LAYERS = 64
_TILED_ROWS = (1, 8, 128)
"""Numbers of rows for which `--tiles` measures tiles."""


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of a step, with the layers that its launches take in turn."""

    layers: tuple[RecurrentLayer, ...]
    cache: StateCache
    layout: StepLayout
    projected: Tensor

    def mix(self, kernels: StateKernels, number: int) -> None:
        """Compute one of the layers."""
        kernels.mix(self.projected, self.layers[number % len(self.layers)], self.cache, self.layout)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--tiles", action="store_true", help="also measure other tiles of the recurrence")


@torch.inference_mode()
def measure(options: argparse.Namespace) -> Measured:
    """Measure all shapes."""
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s", flush=True)
    figures: dict[str, object] = {"copy_gb_per_s": round(copy / 1e9, 1)}
    own = _kernels(None)
    for name, spec in SHAPES.items():
        for rows in ROWS:
            case = make_case(spec, rows, 1)
            seconds = graph_seconds(partial(case.mix, own), 2 * len(case.layers))
            share = _bytes(spec, rows) / seconds / copy
            print(f"{name:14} decode {rows:4} rows {seconds * 1e6:9.1f} us {share:6.1%} of copy", flush=True)
            figures |= {f"{name}_us_{rows}": round(seconds * 1e6, 2), f"{name}_copy_share_{rows}": round(share, 4)}
            if options.tiles and rows in _TILED_ROWS and not isinstance(spec, ShortConvolution):
                _print_tiles(case, copy)
        for key, seconds in _prompts(spec, own):
            print(f"{name:14} prompt of {key:23} {seconds * 1e6:9.1f} us", flush=True)
            figures[f"{name}_prompt_us_{key.replace(' ', '_')}"] = round(seconds * 1e6, 1)
    return "state-layers", figures | {"dtype": "bfloat16", **run_facts("cuda")}


def _prompts(spec: StateLayer, own: StateKernels) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a prompt in a graph and without, by its length and the kernels that computed it."""
    library = None
    if isinstance(spec, GatedDeltaNet):
        library = compiled(choose_chunked_delta(DEVICE, DTYPE, [spec]), [spec], DEVICE, DTYPE)
    ways = {"own": own} | ({} if library is None else {"fla-core": _kernels(library)})
    both_ways = library is not None or isinstance(spec, KimiDeltaAttention)
    for tokens in (*(SHORT_PROMPTS if both_ways else ()), *PROMPTS):
        case = make_case(spec, 1, tokens)
        for way, kernels in ways.items():
            kernels.begin_step(case.layout)
            yield f"{tokens} {way}", graph_seconds(partial(case.mix, kernels), 2)
            yield f"{tokens} {way} launched", median_seconds(partial(case.mix, kernels, 0), rounds=7, warm=3)


def _print_tiles(case: Case, copy: float) -> None:
    """Print the time of the recurrence alone with other numbers of values and warps."""
    spec, rows = case.layers[0].spec, len(case.projected)
    out = case.projected.new_empty(rows, spec.inner)
    for values in (32, 64, 128):
        for warps in (1, 2, 4):

            def launch(number: int, values: int = values, warps: int = warps) -> None:
                layer, span = case.layers[number % len(case.layers)], RowSpan(0, rows, 1)
                recur(
                    case.projected, layer, case.cache, case.layout, span, out,
                    pdl=overlaps_launches(), tile=(values, warps),
                )  # fmt: skip

            seconds = graph_seconds(launch, 2 * len(case.layers))
            share = _bytes(spec, rows) / seconds / copy
            print(f"    {values:3} values, {warps} warps {seconds * 1e6:9.1f} us {share:6.1%}", flush=True)


def _kernels(library: ChunkedDelta | None) -> StateKernels:
    ready: Future[ChunkedDelta | None] = Future()
    ready.set_result(library)
    return StateKernels(overlaps_launches(), ready)


def _bytes(spec: StateLayer, rows: int) -> float:
    """Return the bytes that a decode step of one layer moves."""
    activations = (sum(spec.projected) + spec.inner) * DTYPE.itemsize
    return rows * (2 * layer_bytes(spec.state, DTYPE.itemsize) + activations)


def make_case(spec: StateLayer, rows: int, tokens: int) -> Case:
    """Return a step of `rows` rows of `tokens` tokens; every row reads and writes a page of its own."""
    state = layer_bytes(spec.state, DTYPE.itemsize)
    depth = max(2, min(_MOST_LAYERS, round(LEAST_BYTES / (rows * state)))) if tokens == 1 else 1
    group = StateGroup(tuple(range(depth)), depth, spec.state)
    memory = torch.zeros(rows, depth * state // DTYPE.itemsize, dtype=DTYPE, device=DEVICE)
    pages = torch.randperm(rows, device=DEVICE).int()
    zeros = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    layout = StepLayout(
        positions=torch.zeros(rows * tokens, dtype=torch.int32, device=DEVICE),
        slots=torch.zeros(rows * tokens, dtype=torch.int64, device=DEVICE),
        row_starts=torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=DEVICE),
        context_lens=zeros,
        page_table=zeros[:, None],
        max_row_tokens=tokens,
        max_context=tokens,
        single_rows=rows if tokens == 1 else 0,
        state_pages=torch.stack((pages, pages), 1),
    )
    layer = _layer(spec)
    layers = tuple(replace(layer, index=number) for number in range(depth))
    projected = torch.randn(rows * tokens, sum(spec.projected), dtype=DTYPE, device=DEVICE)
    return Case(layers, state_view(memory, group, DTYPE), layout, projected)


def _layer(spec: StateLayer) -> RecurrentLayer:
    channels = spec.state.heads * spec.state.channels
    weight = torch.randn(channels, spec.width, dtype=DTYPE, device=DEVICE) / 2
    if isinstance(spec, ShortConvolution):
        return RecurrentLayer(0, spec, weight, None, None, None, None, None)
    shape = spec.state
    norm = torch.ones(spec.inner if isinstance(spec, Mamba2) else shape.state[2], dtype=DTYPE, device=DEVICE)
    rates = torch.linspace(1, 16, shape.heads * shape.state[0], device=DEVICE).log()
    steps = torch.full((spec.inner if isinstance(spec, KimiDeltaAttention) else len(rates),), -4.6, device=DEVICE)
    bias, skip = (weight[:, 0].clone(), torch.ones_like(rates)) if isinstance(spec, Mamba2) else (None, None)
    return RecurrentLayer(0, spec, weight, bias, rates, steps, skip, Norm(norm, spec.norm_eps))
