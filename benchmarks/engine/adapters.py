"""Compares decode steps with LoRA adapters with those of the base model on a GPU.

    python -m benchmarks.engine adapters --shape llama-3-8b --rows 32 --adapters 8 --rank 16 [--save]

Weights and adapters are random, shapes are real. The adapters change every linear layer and are assigned to the rows in
turn. Two engines in one process alternate: one without adapters, one with them. Throughput is the rate of steps as in
serving, where each step is launched before the previous one is read; device time is that of the step's CUDA graph. All
ratios are times, base / adapters: 1 = adapters cost nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.command_line import Measured, at_least, need_gpu
from benchmarks.results import run_facts
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.families import slots_of
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.shapes import shape_names, write_shape
from tandem.engine.weights.gguf import default_cache
from tandem.engine.weights.safetensors_file import write_float32
from tandem.settings.parsing import NamedPath

CONTEXT, PROMPT = 1024, 2048
ROUNDS = 5
FLOOR = 0.85
_KV_BYTES_A_TOKEN_MAX = 1 << 18
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shape", choices=shape_names(), default="llama-3-8b")
    parser.add_argument("--rows", type=at_least(1), default=32, help="rows of a decode step")
    parser.add_argument("--adapters", type=at_least(1), default=8)
    parser.add_argument("--rank", type=at_least(1), default=16)
    parser.add_argument("--context", type=at_least(128), default=CONTEXT, help="tokens of each row")


def measure(options: argparse.Namespace) -> Measured:
    """Measure steps of the base model and steps with adapters in alternation."""
    need_gpu()
    with tempfile.TemporaryDirectory() as folder:
        result = _measure(options, Path(folder))
    return f"lora-{options.shape}", result | {"dtype": "bfloat16", **run_facts("cuda")}


def _measure(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    # Triton is not installed on machines without a GPU.
    from benchmarks.engine.gpu_engine import DECODE_STEPS, GpuEngine
    from tandem.engine.model_runner import ModelRunner

    model = write_shape(asked.shape, default_cache() / f"shape-{asked.shape}")
    adapter = write_random_adapter(folder, load_spec(model), asked.rank)
    tokens = max(asked.rows * (asked.context + 2 * DECODE_STEPS + 128), 2 * PROMPT)
    config = EngineConfig.of(
        model,
        device="cuda",
        dtype="bfloat16",
        random_weights=True,
        max_batch_requests=asked.rows,
        kv_cache_bytes=tokens * _KV_BYTES_A_TOKEN_MAX,
        max_loras=asked.adapters,
        max_lora_rank=asked.rank,
    )
    base = GpuEngine(ModelRunner.load(config))
    sources = tuple(NamedPath(f"adapter-{number}", adapter) for number in range(asked.adapters))
    numbers = range(1, asked.adapters + 1)
    adapted = GpuEngine(ModelRunner.load(replace(config, loras=sources)), adapters=numbers)
    unused = GpuEngine(adapted.runner)
    contexts = [asked.context] * asked.rows
    result: dict[str, object] = {
        "shape": asked.shape,
        "rows": asked.rows,
        "adapters": asked.adapters,
        "rank": asked.rank,
        "context": asked.context,
    }
    print(f"{torch.cuda.get_device_name()}, {asked.shape}, {asked.adapters} adapters of rank {asked.rank}", flush=True)
    turns: list[tuple[str, Callable[[GpuEngine], float]]] = [
        ("decode", lambda engine: engine.decode_seconds(asked.rows, asked.context)),
        ("decode_device", lambda engine: engine.graph_seconds(contexts)),
        ("prefill", lambda engine: engine.prefill_seconds(1, PROMPT, rounds=3)),
    ]
    print(f"{'':14} {'base ms':>9} {'adapters':>9} {'ratio':>6} {'no row':>9} {'ratio':>6}")
    for name, turn in turns:
        times: list[list[float]] = [[], [], []]
        for _ in range(ROUNDS):
            for into, engine in zip(times, (base, adapted, unused), strict=True):
                into.append(turn(engine))
        plain, with_adapters, without = (1e3 * statistics.median(some) for some in times)
        print(
            f"{name:14} {plain:9.3f} {with_adapters:9.3f} {plain / with_adapters:6.3f}"
            f" {without:9.3f} {plain / without:6.3f}",
            flush=True,
        )
        result |= {
            f"{name}_base_ms": round(plain, 4),
            f"{name}_ms": round(with_adapters, 4),
            f"{name}_ratio": round(plain / with_adapters, 4),
            f"{name}_unused_ratio": round(plain / without, 4),
        }
    ratio = float(str(result["decode_ratio"]))
    print(
        f"throughput of decode with adapters / base {ratio:.3f}, floor {FLOOR}: {'met' if ratio >= FLOOR else 'MISSED'}"
    )
    return result


def write_random_adapter(folder: Path, spec: ModelSpec, rank: int) -> Path:
    """Write an adapter with small random weights for every linear layer that adapters may change."""
    slots = slots_of(spec, allocate_parameters(spec, torch.bfloat16, torch.device("meta")))
    generator = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, slot in slots.items():
        module = name.removesuffix(".weight")
        if module.endswith(_MODULES) and ".experts." not in module and "shared" not in module:
            n, k = slot.stored_shape
            shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, k)
            shapes[f"base_model.model.{module}.lora_B.weight"] = (n, rank)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    tensors = (generator.standard_normal(shape, dtype=np.float32) * np.float32(0.01) for shape in shapes.values())
    write_float32(folder / "adapter_model.safetensors", shapes, tensors)
    return folder
