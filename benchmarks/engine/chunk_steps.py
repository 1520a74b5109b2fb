"""Measures steps that decode many requests and compute a chunk of a prompt: `python -m benchmarks.engine chunks`.

    python -m benchmarks.engine chunks --device cuda --shape llama-3-8b --rows 128 --save

The time of a step is the time between two tokens of every request that decodes in it (ITL). A longer chunk gives more
prompt tokens a second and a longer ITL. Weights are random; the chunk is the first one of a prompt.
"""

import argparse

from benchmarks.command_line import Measured, at_least
from benchmarks.engine.gpu_engine import DECODE_STEPS, GpuEngine
from benchmarks.results import run_facts
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.shapes import shape_names, write_shape
from tandem.engine.weights.gguf import default_cache

CHUNKS = (0, 64, 128, 256, 512, 1024, 2048, 4096)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shape", choices=shape_names(), default="llama-3-8b")
    parser.add_argument("--rows", type=at_least(1), default=128, help="requests that decode")
    parser.add_argument("--context", type=at_least(64), default=1024, help="tokens of each of them")
    parser.add_argument("--chunks", type=at_least(0), nargs="+", default=list(CHUNKS), help="prompt tokens of a step")
    parser.add_argument("--steps", type=at_least(1), default=DECODE_STEPS, help="timed steps of each chunk")


def measure(options: argparse.Namespace) -> Measured:
    """Measure the steps of each chunk."""
    runner = ModelRunner.load(
        EngineConfig.of(
            write_shape(options.shape, default_cache() / f"shape-{options.shape}"),
            device=options.device,
            dtype="bfloat16",
            random_weights=True,
            max_step_tokens=options.rows + max(options.chunks),
            max_batch_requests=options.rows,
        )
    )
    rows = chunk_rows(GpuEngine(runner), options)
    return f"chunks-{options.shape}", {
        "shape": options.shape,
        "decoding": options.rows,
        "context": options.context,
        "rows": rows,
        "dtype": "bfloat16",
        **run_facts(options.device),
    }


def chunk_rows(engine: GpuEngine, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return and print the ITL in ms, and prompt and answer tokens/s, of steps with each chunk."""
    rows = []
    for chunk in options.chunks:
        seconds = engine.decode_seconds(options.rows, options.context, options.steps, chunk=chunk)
        rows.append(
            {
                "chunk": chunk,
                "itl_ms": round(seconds * 1e3, 3),
                "prompt_tokens_per_s": round(chunk / seconds, 1),
                "answer_tokens_per_s": round(options.rows / seconds, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows
