"""A GGUF file served from its own codes beside the same weights in bfloat16: `python -m benchmarks.tuning.cpu_codes`.

Both are loaded in one process and take turns, so that the noise of the machine affects both alike, and the medians are
compared. Resident memory is that of a process each, which loads one of them, or the weights in float32, the default on
CPUs, and computes a prompt. The last line is JSON: `decode_ratio_bN` and `prefill_ratio_N` are the codes' speed /
bfloat16's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil

from benchmarks.command_line import at_least, exit_on_error
from benchmarks.engine import Engine, random_prompts, take_turns
from benchmarks.results import run_facts, save_result
from tandem.cli.models.default_model import find_default_model
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.cpu.pool import usable_cores
from tandem.engine.model_runner import ModelRunner
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.errors import InvalidArgument

PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS = 128, 33, 512
BATCHES = (1, 8)
_MB = 1e6


def load(folder: Path, threads: int, dtype: str = "bfloat16") -> Engine:
    """Loads a model with the codes that the folder has."""
    return Engine(ModelRunner.load(EngineConfig(folder, dtype=dtype, threads=threads)))


def resident_mb(folder: Path, threads: int, dtype: str) -> float:
    """Returns the resident memory of this process after it has loaded a model and computed a prompt, in MB."""
    engine = load(folder, threads, dtype)
    (prompt,) = random_prompts(1, PROMPT_TOKENS, engine.vocab_size)
    engine.prefill(prompt)
    resident: int = psutil.Process(os.getpid()).memory_info().rss
    return resident / _MB


def measure(plain: Path, codes: Path, threads: int, rounds: int) -> dict[str, float]:
    """Returns the ratios of speed, and the medians in ms that they are of."""
    engines = [load(folder, threads) for folder in (codes, plain)]
    found: dict[str, float] = {}

    def compare(name: str, turn: Callable[[Engine], float]) -> None:
        first, second = take_turns(lambda: turn(engines[0]), lambda: turn(engines[1]), rounds)
        ours, theirs = statistics.median(first), statistics.median(second)
        kind, _, size = name.partition("_")
        found[f"{kind}_ratio_{size}"] = round(theirs / ours, 3)
        found[f"{name}_ms"], found[f"{name}_bf16_ms"] = round(ours * 1e3, 3), round(theirs * 1e3, 3)
        print(f"{name:14} {ours * 1e3:8.2f} ms, bfloat16 {theirs * 1e3:8.2f} ms, ratio {theirs / ours:.2f}")

    for batch in BATCHES:
        asked = random_prompts(batch, PROMPT_TOKENS, engines[0].vocab_size)
        compare(f"decode_b{batch}", lambda engine, asked=asked: engine.decode(asked, NEW_TOKENS)[0])  # type: ignore[misc]
    (prompt,) = random_prompts(1, PREFILL_TOKENS, engines[0].vocab_size)
    compare(f"prefill_{PREFILL_TOKENS}", lambda engine: engine.prefill(prompt))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the command line asks for, and prints JSON last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning.cpu_codes", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a GGUF file with quantized weights (SmolLM2-135M in Q4_1)")
    parser.add_argument("--threads", type=at_least(1), default=usable_cores(), help="(all cores)")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="turns of each (7)")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    chosen = parser.parse_args(arguments)
    with exit_on_error():
        file = chosen.model or find_default_model()
        plain, codes = prepare_model(file), prepare_model(file, codes=True)
        if plain == codes:
            raise InvalidArgument("--model", f"{file} has no codes that are served as they are; take a quantized GGUF.")
        resident = {}
        for name, folder, dtype in (
            ("codes", codes, "bfloat16"),
            ("bf16", plain, "bfloat16"),
            ("float32", plain, "float32"),
        ):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                resident[f"resident_{name}_mb"] = round(
                    process.submit(resident_mb, folder, chosen.threads, dtype).result()
                )
        print("MB:", *(f"{name} {size}" for name, size in resident.items()))
        result = {"model": file.stem, "dtype": "bfloat16", "threads": chosen.threads, **resident}
        result |= measure(plain, codes, chosen.threads, chosen.rounds) | run_facts("cpu")
        if chosen.save:
            print("saved", save_result(f"codes-{file.stem}", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
