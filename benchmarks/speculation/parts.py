"""Compares the parts of a step that verifies draft tokens with a plain step: `python -m benchmarks.speculation parts`.

For each batch and number of draft tokens, the time of each part of the step on the device (products, attention,
sampling, and all other kernels and copies), the time between steps in which the device waits for the host, and their
ratios to those of the plain step. A plain step is launched before the previous one is read; a step with draft tokens
is launched afterwards, because its positions depend on the accepted draft tokens. The model's weights are random.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import Measured, at_least, need_gpu
from benchmarks.engine.device_spans import Span, added_time, idle_share, last_steps, record_spans
from benchmarks.engine.gpu_engine import GpuEngine
from benchmarks.results import run_facts
from benchmarks.speculation.draft_rows import with_drafts
from tandem.engine.config import EngineConfig
from tandem.engine.cuda.verify_graphs import MOST_ROWS
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.shapes import write_shape
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights.gguf import default_cache

PARTS = {
    "attention": ("attention_kernel", "tile_ranges", "_rope"),
    "sampling": ("choice", "choose", "collect", "best", "weigh", "argmax", "reduce_kernel", "_merge_blocks"),
    "products": ("gemv", "skinny", "packed_kernel", "scaled_kernel", "w4a8_kernel", "quantize", "nvjet", "gemm"),
}  # fmt: skip
"""Parts of a step, each with what the names of its kernels contain; all other kernels and copies are `other`."""
WAITING = "waiting for the host"
_STEPS, _WARM_STEPS = 24, 8

Figures = dict[str, float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shape", default="llama-3-8b", help="a model's shape, of random weights (llama-3-8b)")
    parser.add_argument("--quantization", choices=["int8", "fp8", "int4"], help="of the layers' weights")
    parser.add_argument("--batch", nargs="+", type=at_least(1), default=[1, 8, 32], help="requests (1 8 32)")
    parser.add_argument("--drafts", nargs="+", type=at_least(1), default=[3], help="draft tokens of each request (3)")
    parser.add_argument("--context", type=at_least(64), default=1024, help="tokens of each request (1024)")


def measure(options: argparse.Namespace) -> Measured:
    """Measure plain and verifying steps, and print a table of their parts."""
    need_gpu()
    config = EngineConfig.of(
        write_shape(options.shape, default_cache() / f"shape-{options.shape}"),
        device="cuda",
        dtype="bfloat16",
        random_weights=True,
        max_batch_requests=max(options.batch),
        memory_fraction=0.85,
        quantization=options.quantization,
        draft_graphs=True,
    )
    engine = GpuEngine(ModelRunner.load(config))
    rows: list[dict[str, object]] = []
    for batch in options.batch:
        plain = step_parts(partial(engine.decode_steps, batch, options.context))
        for drafts in options.drafts:
            if batch * (drafts + 1) > MOST_ROWS:
                continue
            misses = engine.runner.graph_use.misses
            verify = step_parts(partial(verify_steps, engine, batch, drafts, options.context))
            misses = engine.runner.graph_use.misses - misses
            rows.append({"batch": batch, "drafts": drafts, "graph_misses": misses, "plain": plain, "verify": verify})
            Console().print(table_of(batch, drafts, plain, verify))
    name = options.shape if options.quantization is None else f"{options.shape}_{options.quantization}"
    return f"speculation-parts-{name}", {"shape": name, "dtype": "bfloat16", "rows": rows, **run_facts("cuda")}


def verify_steps(engine: GpuEngine, batch: int, drafts: int, first: int, steps: int) -> Iterator[None]:
    """Run `steps` steps of `batch` requests with `drafts` draft tokens each from position `first`, of which none match.

    Yields after each step, whose tokens have been read.
    """
    rows = engine.decode_rows(batch, first, steps + drafts)
    for number in range(steps):
        newest = [row._replace(start=first + number) for row in rows]
        engine.runner.run(StepBatch([], with_drafts(newest, [range(1, drafts + 1)] * batch)))
        yield


def step_parts(run: Callable[[int], Iterator[None]]) -> Figures:
    """Return the microseconds of a step on the host's clock, and of each part on the device."""

    def steps(count: int) -> None:
        for _ in run(count):
            pass

    steps(_WARM_STEPS)
    started = time.perf_counter()
    steps(_STEPS)
    wall = (time.perf_counter() - started) / _STEPS * 1e6
    every = _WARM_STEPS + _STEPS
    spans = last_steps(record_spans(lambda: steps(every)), _STEPS, every)
    return {"step": round(wall, 1), **parts_of(spans, _STEPS)}


def parts_of(spans: Sequence[Span], steps: int) -> Figures:
    """Return the microseconds of a step by part, given the device's work in `steps` steps."""
    whole = max(span.end for span in spans) - spans[0].start
    parts: dict[str, float] = defaultdict(float)
    for name, micros in added_time(spans).items():
        parts[part_of(name)] += micros
    parts[WAITING] = idle_share(spans) * whole
    return {part: round(parts[part] / steps, 1) for part in (*PARTS, "other", WAITING)}


def part_of(kernel: str) -> str:
    """Return the part of a step to which a kernel or copy belongs."""
    return next((part for part, words in PARTS.items() if any(word in kernel for word in words)), "other")


def table_of(batch: int, drafts: int, plain: Figures, verify: Figures) -> Table:
    """Return a table of the parts of both steps."""
    table = Table("part", "plain, µs", "verify, µs", "÷ plain", title=f"batch {batch}, {drafts} draft tokens")
    for part, micros in plain.items():
        ratio = f"{verify[part] / micros:.2f}" if micros else ""
        table.add_row(part, f"{micros:.0f}", f"{verify[part]:.0f}", ratio)
    return table
