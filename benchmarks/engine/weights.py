"""Measures how fast the engine loads a checkpoint: `python -m benchmarks.engine weights --device cuda`.

The benchmark writes safetensors files of a real shape, warms the page cache and loads them with the engine's own
loader. The ceiling is a copy from pinned memory to the GPU or, on a CPU, a copy within its memory.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.command_line import Measured
from benchmarks.gpu_timing import median_seconds
from benchmarks.results import run_facts
from tandem.engine.config.model import ModelSpec
from tandem.engine.device import parse_device
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.families import slots_of
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.parameters import tensors_of
from tandem.engine.models.shapes import shape_names, write_shape
from tandem.engine.weights.checkpoint import load_weights

GIB = 1 << 30
_STORED = torch.bfloat16
_BLOCK = 1 << 22
_READ_BYTES = 1 << 24
_COPY_BYTES = 1 << 29
_COPIES = 7
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Figures = dict[str, object]


def write_checkpoint(folder: Path, shape: str, size: float) -> ModelSpec:
    """Write a checkpoint of `shape` with enough layers for about `size` bytes, at least one layer.

    As in large checkpoints, there is one file per layer and one for the rest. The values are random but reproducible.
    """
    config = load_spec(write_shape(shape, folder))
    config = replace(config, layers=config.layers[: _layers_of(config, size)])
    layers = len(config.layers)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(described | {"num_hidden_layers": layers}), encoding="utf-8")
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, slot in _slots(config, torch.device("meta")).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files[f"model-{layer}.safetensors"][name] = slot
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(1)).to(_STORED)
    for file, slots in files.items():
        save_file({name: _repeated(block, slot.shape) for name, slot in slots.items()}, folder / file)
    weight_map = {name: file for file, slots in files.items() for name in slots}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return config


def measure_loads(folder: Path, config: ModelSpec, device: torch.device, dtype: torch.dtype, rounds: int) -> Figures:
    """Measure loads from the page cache into weights of `dtype`: seconds, bytes, and host memory."""
    size = _warm(folder)
    with torch.inference_mode():
        parameters = allocate_parameters(config, dtype, device)
        for _, tensor in tensors_of(parameters):
            tensor.zero_()
        seconds, extra = _load_rounds(lambda: load_weights(folder, config, parameters), rounds)
    ceiling = _pinned_copy(device) if device.type == "cuda" else _host_copy()
    speed = size / statistics.median(seconds)
    return {
        "load_gb_per_s": round(speed / 1e9, 4),
        "load_ratio": round(speed / ceiling, 6),
        "copy_gb_per_s": round(ceiling / 1e9, 2),
        "load_seconds": [round(duration_s, 3) for duration_s in seconds],
        "checkpoint_gib": round(size / GIB, 2),
        "host_extra_gib": round(extra / GIB, 3),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--shape", default="llama-3-8b", choices=shape_names())
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint, by its number of layers")
    parser.add_argument("--dtype", default="bfloat16", choices=_DTYPES, help="of the weights in memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoint is written for the run")


def measure(options: argparse.Namespace) -> Measured:
    """Write a checkpoint, and measure several loads of it."""
    device = parse_device(options.device)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="tandem-weights-") as made:
        folder = Path(made)
        if shutil.disk_usage(folder).free < (options.gib + 2) * GIB:
            raise SystemExit(f"{folder.parent} has less than {options.gib:g} GiB free; give another --folder")
        config = write_checkpoint(folder, options.shape, options.gib * GIB)
        print(f"{options.shape} with {len(config.layers)} layers is written", flush=True)
        result = measure_loads(folder, config, device, _DTYPES[options.dtype], options.rounds)
    print(
        f"loaded {result['checkpoint_gib']} GiB at {result['load_gb_per_s']:.2f} GB/s,"
        f" {result['load_ratio']:.1%} of a copy ({result['copy_gb_per_s']} GB/s);"
        f" {result['host_extra_gib']} GiB of host memory used meanwhile"
    )
    result |= {"shape": options.shape, "layers": len(config.layers), "dtype": options.dtype}
    return f"weights-{options.shape}", result | run_facts(options.device)


def _slots(config: ModelSpec, device: torch.device) -> dict[str, Tensor]:
    slots = slots_of(config, allocate_parameters(config, _STORED, device))
    return {name: slot.tensor for name, slot in slots.items() if isinstance(slot.tensor, Tensor)}


def _layers_of(config: ModelSpec, size: float) -> int:
    one, two = (_bytes(replace(config, layers=config.layers[:n])) for n in (1, 2))
    return min(len(config.layers), max(1, round((size - one) / (two - one)) + 1))


def _bytes(config: ModelSpec) -> int:
    return sum(slot.numel() for slot in _slots(config, torch.device("meta")).values()) * _STORED.itemsize


def _repeated(block: Tensor, shape: torch.Size) -> Tensor:
    return block.repeat(-(-shape.numel() // len(block)))[: shape.numel()].view(shape).contiguous()


def _warm(folder: Path) -> int:
    """Flush all weights to disk, read them into the page cache, and return their bytes."""
    size = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            while piece := stream.read(_READ_BYTES):
                size += len(piece)
    return size


def _load_rounds(load: Callable[[], None], rounds: int) -> tuple[list[float], int]:
    """Return the seconds of each round, and the largest growth of the process's memory in bytes."""
    before = psutil.Process().memory_info().rss
    _forget_peak()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        load()
        seconds.append(time.perf_counter() - started)
    return seconds, max(0, _peak_bytes() - before)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _peak_bytes() -> int:
    """Return the process's peak memory in bytes since `_forget_peak`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _pinned_copy(device: torch.device) -> float:
    """Return the copy bandwidth from pinned memory to the GPU, in bytes per second."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return _COPY_BYTES / median_seconds(lambda: target.copy_(source, non_blocking=True))


def _host_copy() -> float:
    """Return the copy bandwidth of all cores within host memory, in bytes per second; reads and writes count once."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(_COPIES):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return _COPY_BYTES / statistics.median(seconds)
