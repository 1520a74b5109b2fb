"""Measures the engine's steps: on a CPU against transformers, on a GPU against the chip's ceilings.

    python -m benchmarks.engine --device cpu --peer transformers
    python -m benchmarks.engine --device cuda --shape llama-3-8b [--quantization int4] [--before]

On a GPU the weights are random. `--profile`, which needs no `--device`, shows where the time of a step goes.
"""

import argparse
from pathlib import Path

from benchmarks.command_line import Measured, need_gpu
from tandem.engine.device import parse_device
from tandem.engine.kernels.cpu.pool import usable_cores
from tandem.engine.models.shapes import shape_names
from tandem.protocol.errors import InvalidArgument

_CPU = {
    "peer": "transformers",
    "dtype": "both",
    "model": None,
    "threads": usable_cores(),
    "prompt_tokens": 128,
    "new_tokens": 33,
    "prefill_tokens": 512,
    "rounds": 5,
}
_GPU = {
    "shape": "llama-3-8b",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "before": False,
    "eager": False,
    "long_prompt": None,
    "profile": None,
}
"""Defaults of the options that apply to one device only."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(cpu; with --profile cuda)")
    gpu = parser.add_argument_group("with --device cuda")
    gpu.add_argument("--shape", choices=shape_names(), help="whose shape the random weights have (llama-3-8b)")
    gpu.add_argument("--quantization", choices=["int8", "fp8", "int4"], help="of the layers' weights")
    gpu.add_argument("--kv-cache-dtype", choices=["auto", "int8", "fp8"], help="(auto)")
    gpu.add_argument("--before", action="store_true", default=None, help="measure the same steps in 16 bits first")
    gpu.add_argument("--eager", action="store_true", default=None, help="measure decode without CUDA graphs too")
    gpu.add_argument("--long-prompt", type=int, metavar="TOKENS", help="of a prompt, measured in chunks too")
    gpu.add_argument(
        "--profile", type=Path, nargs="?", const=Path("trace.json"), help="write a Chrome trace there instead"
    )
    cpu = parser.add_argument_group("with --device cpu")
    cpu.add_argument("--peer", choices=["transformers", "bfloat16"], help="bfloat16: a GGUF file's codes against that")
    cpu.add_argument("--dtype", choices=["float32", "bfloat16", "both"], help="(both)")
    cpu.add_argument("--model", type=Path, help="Hugging Face folder or GGUF file")
    for name, what in (("threads", "all cores"), *((option, _CPU[option]) for option in list(_CPU)[4:])):
        cpu.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"({what})")


def measure(options: argparse.Namespace) -> Measured:
    """Measure on the chosen device.

    Raises InvalidArgument for an option that applies only to the other kind of device.
    """
    device = options.device or ("cpu" if options.profile is None else "cuda")
    ours, others = (_GPU, _CPU) if device == "cuda" else (_CPU, _GPU)
    if misplaced := [f"--{name.replace('_', '-')}" for name in others if getattr(options, name) is not None]:
        other_device = "cpu" if device == "cuda" else "cuda"
        raise InvalidArgument(misplaced[0], f"is only with --device {other_device}; leave out one or the other")
    if options.profile is not None and options.eager:
        raise InvalidArgument("--eager", "a profile measures no steps without CUDA graphs; leave out one or the other")
    chosen = argparse.Namespace(**{name: _or(getattr(options, name), default) for name, default in ours.items()})
    # transformers is imported on CPUs only, and Triton is installed on GPU machines only.
    if device == "cpu":
        from benchmarks.engine import cpu_comparison

        return cpu_comparison.measure(chosen)
    if options.profile is not None:
        need_gpu()
    parse_device(device)
    from benchmarks.engine import gpu_shares

    return gpu_shares.measure(chosen, device)


def _or(value: object, default: object) -> object:
    return default if value is None else value
