"""The engine against transformers: `python -m benchmarks.engine --device cpu --peer transformers`.

Same model, dtype and threads on both sides, in one process. The two sides take turns, so that a noisy machine is as
noisy for one as for the other, and the medians of the turns are compared. Decode excludes the prefill on both sides.

On a GPU (`--device cuda --shape llama-3-8b`) the engine is measured against the chip: see benchmarks/gpu/engine_gpu.py.
There `--profile`, which needs no `--device`, shows where a step's time goes.

The last line is one JSON object with `decode_ratio_b1`, `decode_ratio_b8` and `prefill_ratio_512`: how many times
faster the engine is. These are float32's; bfloat16's have the suffix `_bf16`.
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

from benchmarks.command_line import errors_in_words, need_gpu
from benchmarks.cpu.bandwidth import read_bandwidth
from benchmarks.results import run_facts, save_result
from cli.models.default_model import NAME, find_default_model
from engine.config import EngineConfig
from engine.device import parse_device
from engine.kernels.cpu.pool import usable_cores
from engine.model_runner import ModelRunner
from engine.models.shapes import shape_names
from engine.steps.batch import Draw, StepBatch, StepRow
from engine.weights.gguf import prepare_model
from wire.messages import SamplingParams

if TYPE_CHECKING:
    from benchmarks.cpu.peer_transformers import Prompts, TransformersPeer

_DTYPES = ("float32", "bfloat16")
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in tokens: `batches` of `prompt` tokens decode `new_tokens`; a `prefill` is timed to its first token."""

    batches: Sequence[int] = (1, 8)
    prompt: int = 128
    new_tokens: int = 33
    prefill: int = 512
    rounds: int = 5


DEFAULTS = Settings()
_WHAT = "The engine against transformers on a CPU, or against the chip's ceilings on a GPU. The last line is JSON."
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
_GPU_OPTIONS = {"shape": "llama-3-8b", "eager": False, "profile": None}
"""Options that count on one device only, with what they are where the command line does not say."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity on both sides: seconds of each turn, medians decide."""

    name: str
    engine: Sequence[float]
    peer: Sequence[float]
    bytes_read: int = 0
    """What a decode step must read, 0 where that is not the limit."""
    same_tokens: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.peer) / statistics.median(self.engine)


class Engine:
    """One runner, its pages handed out by position: request b has pages b · share, b · share + 1, …"""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.vocab_size = runner.model_config.vocab_size
        # The peer needs PyTorch's threads; the runner has just said how many it wants.
        self._torch_threads = torch.get_num_threads()

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its first token, in one step."""
        torch.set_num_threads(self._torch_threads)
        started = time.perf_counter()
        self._step([prompt], [0])
        return time.perf_counter() - started

    def decode(self, prompts: Prompts, new_tokens: int) -> tuple[float, Prompts]:
        """Seconds a decode step of all prompts, and the tokens; the prompts' own step is left out."""
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
        """Bytes of the keys and values of `tokens` tokens."""
        return tokens * self._runner.cache.tensor[0].nbytes // self._runner.page_tokens

    def _step(self, pieces: Prompts, starts: list[int]) -> list[int]:
        share = self._runner.cache.pages // len(pieces)
        rows = [
            StepRow(piece, start, range(number * share, (number + 1) * share), Draw(_GREEDY, 0))
            for number, (piece, start) in enumerate(zip(pieces, starts, strict=True))
        ]
        return [token for token in self._runner.run(StepBatch(rows)).token_ids if token is not None]


def compare(engine: Engine, peer: TransformersPeer, settings: Settings) -> list[Comparison]:
    """All quantities; every side has one turn of each before it counts."""
    compared = []
    for batch in settings.batches:
        prompts = _prompts(batch, settings.prompt, engine.vocab_size)
        ours, theirs, same = _decode_turns(engine, peer, prompts, settings)
        read = peer.weight_bytes() + batch * engine.kv_bytes(settings.prompt + settings.new_tokens // 2)
        compared.append(Comparison(f"decode_ratio_b{batch}", ours, theirs, read, same))
    (prompt,) = _prompts(1, settings.prefill, engine.vocab_size)
    turns = _take_turns(lambda: engine.prefill(prompt), lambda: peer.prefill(prompt), settings.rounds)
    compared.append(Comparison(f"prefill_ratio_{settings.prefill}", *turns))
    return compared


def _decode_turns(
    engine: Engine, peer: TransformersPeer, prompts: Prompts, settings: Settings
) -> tuple[list[float], list[float], str]:
    answers: dict[str, Prompts] = {}

    def turn(side: Engine | TransformersPeer, name: str) -> float:
        seconds, answers[name] = side.decode(prompts, settings.new_tokens)
        return seconds

    ours, theirs = _take_turns(lambda: turn(engine, "engine"), lambda: turn(peer, "peer"), settings.rounds)
    same = sum(a == b for a, b in zip(answers["engine"], answers["peer"], strict=True))
    return ours, theirs, f"{same} of {len(prompts)}"


def _take_turns(engine: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    engine(), peer()
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(engine())
        theirs.append(peer())
    return ours, theirs


def _prompts(batch: int, tokens: int, vocab_size: int) -> Prompts:
    generator = torch.Generator().manual_seed(batch)
    prompts: Prompts = torch.randint(3, vocab_size, (batch, tokens), generator=generator).tolist()
    return prompts


def measure(folder: Path, dtype: str, threads: int, settings: Settings) -> tuple[list[Comparison], float]:
    """Load both sides and compare them → the comparisons and the read bandwidth in GB/s."""
    engine = Engine(ModelRunner.load(EngineConfig(folder, dtype=dtype, threads=threads)))
    from benchmarks.cpu.peer_transformers import TransformersPeer  # here, as GPUs' start is measured without it

    peer = TransformersPeer(folder, dtype, threads)
    bandwidth = read_bandwidth(threads)
    compared = compare(engine, peer, settings)
    return compared, max(bandwidth, read_bandwidth(threads))


def print_table(dtype: str, compared: Sequence[Comparison], bandwidth: float) -> None:
    """Medians and best turns of both sides."""
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
    """Ratios, and what they are made of, for JSON."""
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
    """The command line; options that count on the other device are refused, not ignored."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=_WHAT)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(cpu; with --profile cuda)")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    gpu = parser.add_argument_group("with --device cuda")
    gpu.add_argument("--shape", choices=shape_names(), help="whose shape the random weights have (llama-3-8b)")
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
        parser.error(f"{', '.join(misplaced)}: counts with --device {other} only; leave out one or the other")
    if chosen.profile is not None and chosen.eager:
        parser.error("--eager: a profile measures no steps without CUDA graphs; leave out one or the other")
    for name, default in ours.items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, default)
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for and print it, JSON last."""
    chosen = parse_arguments(arguments)
    with errors_in_words():
        if chosen.device == "cpu":
            _run_on_cpu(chosen)
            return
        if chosen.profile:
            need_gpu()
        parse_device(chosen.device)
        # Triton need not be there where no GPU is.
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
