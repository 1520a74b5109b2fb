"""Compares the engine with transformers: `python -m benchmarks.engine --device cpu --peer transformers`.

Both sides use the same model, dtype and threads in one process. They take turns, so that noise of the machine affects
both alike, and the medians are compared. Decode excludes the prefill on both sides.

On a GPU (`--device cuda --shape llama-3-8b`) the engine is compared with the chip's ceilings: see
benchmarks/gpu/engine_gpu.py. There `--profile`, which needs no `--device`, shows where a step's time goes.

The last line is one JSON object with `decode_ratio_b1`, `decode_ratio_b8` and `prefill_ratio_512`: the engine's speed /
the peer's. These are of float32; those of bfloat16 have the suffix `_bf16`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.command_line import exit_on_error, need_gpu
from benchmarks.cpu.bandwidth import read_bandwidth
from benchmarks.results import run_facts, save_result
from tandem.cli.models.default_model import NAME, find_default_model
from tandem.engine.config import EngineConfig
from tandem.engine.device import parse_device
from tandem.engine.kernels.cpu.pool import usable_cores
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.shapes import shape_names
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.messages import SamplingParams

if TYPE_CHECKING:
    from benchmarks.cpu.peer_transformers import Prompts, TransformersPeer

_DTYPES = ("float32", "bfloat16")
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in tokens: `batches` of `prompt` tokens decode `new_tokens`; `prefill` is timed to its first token."""

    batches: Sequence[int] = (1, 8)
    prompt: int = 128
    new_tokens: int = 33
    prefill: int = 512
    rounds: int = 5


DEFAULTS = Settings()
_WHAT = "Compares the engine with transformers on a CPU, or with the chip's ceilings on a GPU. The last line is JSON."
_CPU_OPTIONS = {
    "peer": "transformers",
    "dtype": "both",
    "model": None,
    "threads": usable_cores(),
    "prompt_tokens": DEFAULTS.prompt,
    "new_tokens": DEFAULTS.new_tokens,
    "prefill_tokens": DEFAULTS.prefill,
    "rounds": DEFAULTS.rounds,
}
_GPU_OPTIONS = {
    "shape": "llama-3-8b",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "before": False,
    "eager": False,
    "profile": None,
}
"""Defaults of the options that only one device uses."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of each turn of both sides for one quantity; the medians are compared."""

    name: str
    engine: Sequence[float]
    peer: Sequence[float]
    bytes_read: int = 0
    """Bytes that a decode step must read; 0 for prefill."""
    same_tokens: str = ""

    @property
    def ratio(self) -> float:
        """The engine's speed / the peer's, from the medians."""
        return statistics.median(self.peer) / statistics.median(self.engine)


class Engine:
    """A runner whose pages this object hands out by position.

    Request b has the pages from b · share to (b + 1) · share - 1.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.vocab_size = runner.spec.vocab_size
        # The peer needs PyTorch's threads; the runner has just set their number.
        self._torch_threads = torch.get_num_threads()

    def prefill(self, prompt: list[int]) -> float:
        """Returns the seconds from a prompt to its first token, in one step."""
        torch.set_num_threads(self._torch_threads)
        started = time.perf_counter()
        self._step([prompt], [0])
        return time.perf_counter() - started

    def decode(self, prompts: Prompts, new_tokens: int) -> tuple[float, Prompts]:
        """Returns seconds per decode step of all prompts, and the tokens; the prefill step does not count."""
        torch.set_num_threads(self._torch_threads)
        pieces, starts = prompts, [0] * len(prompts)
        answers: Prompts = [[] for _ in prompts]
        started = 0.0
        for _ in range(new_tokens):
            tokens = self._step(pieces, starts)
            started = started or time.perf_counter()
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
            starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
            pieces = [[token] for token in tokens]
        return (time.perf_counter() - started) / (new_tokens - 1), answers

    def kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of the KV of `tokens` tokens."""
        return tokens * self._runner.cache.page_bytes // self._runner.page_tokens

    def _step(self, pieces: Prompts, starts: list[int]) -> list[int]:
        share = self._runner.cache.pages // len(pieces)
        rows = [
            StepRow(piece, start, range(number * share, (number + 1) * share), SamplingInput(_GREEDY, 0))
            for number, (piece, start) in enumerate(zip(pieces, starts, strict=True))
        ]
        return [token for token in self._runner.run(StepBatch(rows)).token_ids if token is not None]


def compare(engine: Engine, peer: TransformersPeer, settings: Settings) -> list[Comparison]:
    """Compares all quantities; each side first has one turn that does not count."""
    compared = []
    for batch in settings.batches:
        prompts = random_prompts(batch, settings.prompt, engine.vocab_size)
        ours, theirs, same = _decode_turns(engine, peer, prompts, settings)
        read = peer.weight_bytes() + batch * engine.kv_bytes(settings.prompt + settings.new_tokens // 2)
        compared.append(Comparison(f"decode_ratio_b{batch}", ours, theirs, read, same))
    (prompt,) = random_prompts(1, settings.prefill, engine.vocab_size)
    turns = take_turns(lambda: engine.prefill(prompt), lambda: peer.prefill(prompt), settings.rounds)
    compared.append(Comparison(f"prefill_ratio_{settings.prefill}", *turns))
    return compared


def _decode_turns(
    engine: Engine, peer: TransformersPeer, prompts: Prompts, settings: Settings
) -> tuple[list[float], list[float], str]:
    answers: dict[str, Prompts] = {}

    def turn(side: Engine | TransformersPeer, name: str) -> float:
        seconds, answers[name] = side.decode(prompts, settings.new_tokens)
        return seconds

    ours, theirs = take_turns(lambda: turn(engine, "engine"), lambda: turn(peer, "peer"), settings.rounds)
    same = sum(a == b for a, b in zip(answers["engine"], answers["peer"], strict=True))
    return ours, theirs, f"{same} of {len(prompts)}"


def take_turns(engine: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Returns the results of `rounds` calls of each in turn, after a call of each that does not count."""
    engine(), peer()
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(engine())
        theirs.append(peer())
    return ours, theirs


def random_prompts(batch: int, tokens: int, vocab_size: int) -> Prompts:
    """Returns `batch` prompts of so many random token ids, the same in each call."""
    generator = torch.Generator().manual_seed(batch)
    prompts: Prompts = torch.randint(3, vocab_size, (batch, tokens), generator=generator).tolist()
    return prompts


def measure(folder: Path, dtype: str, threads: int, settings: Settings) -> tuple[list[Comparison], float]:
    """Loads both sides and compares them; returns the comparisons and the read bandwidth in GB/s."""
    engine = Engine(ModelRunner.load(EngineConfig(folder, dtype=dtype, threads=threads)))
    from benchmarks.cpu.peer_transformers import (
        TransformersPeer,
    )  # imported here: the start on GPUs is measured without it

    peer = TransformersPeer(folder, dtype, threads)
    bandwidth = read_bandwidth(threads)
    compared = compare(engine, peer, settings)
    return compared, max(bandwidth, read_bandwidth(threads))


def print_table(dtype: str, compared: Sequence[Comparison], bandwidth: float) -> None:
    """Prints medians and best turns of both sides."""
    print(f"\n{dtype}; plain read {bandwidth:.1f} GB/s; milliseconds a decode step or a prefill: median (best)")
    for each in compared:
        ours, theirs = statistics.median(each.engine), statistics.median(each.peer)
        share = each.bytes_read / ours / 1e9
        print(
            f"  {each.name:18} engine {ours * 1e3:8.2f} ({min(each.engine) * 1e3:.2f})"
            f"  transformers {theirs * 1e3:8.2f} ({min(each.peer) * 1e3:.2f})  ratio {each.ratio:.2f}"
            + (f"  reads {share:.1f} GB/s = {share / bandwidth:.0%}" if each.bytes_read else "")
            + (f"  same tokens {each.same_tokens}" if each.same_tokens else "")
        )


def as_result(compared: Sequence[Comparison], bandwidth: float, suffix: str) -> dict[str, object]:
    """Returns ratios and the underlying times for JSON."""
    result: dict[str, object] = {each.name + suffix: round(each.ratio, 3) for each in compared}
    for each in compared:
        name = each.name.replace("ratio_", "") + suffix
        result[f"{name}_engine_ms"] = [round(seconds * 1e3, 3) for seconds in each.engine]
        result[f"{name}_peer_ms"] = [round(seconds * 1e3, 3) for seconds in each.peer]
        if each.bytes_read:
            result[f"{name}_gb_per_s"] = round(each.bytes_read / statistics.median(each.engine) / 1e9, 2)
            result[f"{name}_same_tokens"] = each.same_tokens
    return result | {f"read_gb_per_s{suffix}": round(bandwidth, 2)}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; options of the other device are errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=_WHAT)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(cpu; with --profile cuda)")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    gpu = parser.add_argument_group("with --device cuda")
    gpu.add_argument("--shape", choices=shape_names(), help="whose shape the random weights have (llama-3-8b)")
    gpu.add_argument("--quantization", choices=["int8", "fp8", "int4"], help="of the layers' weights")
    gpu.add_argument("--kv-cache-dtype", choices=["auto", "int8", "fp8"], help="(auto)")
    gpu.add_argument("--before", action="store_true", default=None, help="measure the same steps in 16 bits first")
    gpu.add_argument("--eager", action="store_true", default=None, help="measure decode without CUDA graphs too")
    gpu.add_argument(
        "--profile", type=Path, nargs="?", const=Path("trace.json"), help="write a Chrome trace there instead"
    )
    cpu = parser.add_argument_group("with --device cpu")
    cpu.add_argument("--peer", choices=["transformers"])
    cpu.add_argument("--dtype", choices=[*_DTYPES, "both"], help="(both)")
    cpu.add_argument("--model", type=Path, help="Hugging Face folder or GGUF file")
    cpu.add_argument("--threads", type=int, help="(all cores)")
    cpu.add_argument("--prompt-tokens", type=int, help=f"({DEFAULTS.prompt})")
    cpu.add_argument("--new-tokens", type=int, help=f"({DEFAULTS.new_tokens})")
    cpu.add_argument("--prefill-tokens", type=int, help=f"({DEFAULTS.prefill})")
    cpu.add_argument("--rounds", type=int, help=f"({DEFAULTS.rounds})")
    chosen = parser.parse_args(arguments)
    if chosen.device is None:
        chosen.device = "cpu" if chosen.profile is None else "cuda"
    ours, others = (_GPU_OPTIONS, _CPU_OPTIONS) if chosen.device == "cuda" else (_CPU_OPTIONS, _GPU_OPTIONS)
    if misplaced := [f"--{name.replace('_', '-')}" for name in others if getattr(chosen, name) is not None]:
        other = "cpu" if chosen.device == "cuda" else "cuda"
        parser.error(f"{', '.join(misplaced)}: only with --device {other}; leave out one or the other")
    if chosen.profile is not None and chosen.eager:
        parser.error("--eager: a profile measures no steps without CUDA graphs; leave out one or the other")
    for name, default in ours.items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, default)
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the command line asks for, and prints JSON last."""
    chosen = parse_arguments(arguments)
    with exit_on_error():
        if chosen.device == "cpu":
            _run_on_cpu(chosen)
            return
        if chosen.profile:
            need_gpu()
        parse_device(chosen.device)
        # Triton is not installed where there is no GPU.
        from benchmarks.gpu import engine_gpu

        engine_gpu.run(chosen)


def _run_on_cpu(chosen: argparse.Namespace) -> None:
    folder = prepare_model(chosen.model or find_default_model())
    settings = Settings(
        prompt=chosen.prompt_tokens,
        new_tokens=chosen.new_tokens,
        prefill=chosen.prefill_tokens,
        rounds=chosen.rounds,
    )
    result: dict[str, object] = {}
    for dtype in _DTYPES if chosen.dtype == "both" else (chosen.dtype,):
        compared, bandwidth = measure(folder, dtype, chosen.threads, settings)
        print_table(dtype, compared, bandwidth)
        suffix = "_bf16" if chosen.dtype == "both" and dtype == "bfloat16" else ""
        result |= as_result(compared, bandwidth, suffix)
    name = NAME if chosen.model is None else folder.name
    result |= {"model": name, "dtype": chosen.dtype, "threads": chosen.threads, **run_facts(chosen.device)}
    if chosen.save:
        print("saved", save_result(f"engine-{name}", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
