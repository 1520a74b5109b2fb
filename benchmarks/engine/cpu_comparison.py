"""Compares the engine with transformers on a CPU, or quantized GGUF weights with the same weights in bfloat16.

Both sides use the same model, dtype and threads in one process. They alternate, so that noise of the machine affects
both alike, and medians are compared. Decode times exclude the prefill on both sides. Ratios are the engine's speed /
the peer's. If float32 is measured as well, the names of bfloat16's ratios end with `_bf16`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit

from benchmarks.command_line import Measured
from benchmarks.engine.transformers_peer import Prompts, TransformersPeer
from benchmarks.results import run_facts
from tandem.cli.models.default_model import NAME, find_default_model
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import SamplingParams

DTYPES = ("float32", "bfloat16")
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_BYTES = 1 << 28
"""Size of the array for measuring the read bandwidth, in bytes; far more than the caches hold."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in tokens, and the number of rounds.

    Decode steps are measured for each batch size in `batches`, with prompts of `prompt` tokens and answers of
    `new_tokens` tokens. The time to the first token is measured with prompts of `prefill` tokens.
    """

    batches: Sequence[int] = (1, 8)
    prompt: int = 128
    new_tokens: int = 33
    prefill: int = 512
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """The times of both sides for one quantity, in seconds per round; the medians are compared."""

    name: str
    engine: Sequence[float]
    peer: Sequence[float]
    bytes_read: int = 0
    """Bytes that a decode step must read; 0 for prefill."""
    same_tokens: str = ""

    @property
    def ratio(self) -> float:
        """The engine's speed / the peer's speed, from the medians."""
        return statistics.median(self.peer) / statistics.median(self.engine)


class Engine:
    """A model runner that serves requests by index, with a fixed share of the pages for each.

    Request b has the pages from b · share to (b + 1) · share - 1.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.vocab_size = runner.spec.vocab_size
        # Loading the runner has set PyTorch's thread count. The peer sets its own, so this one is restored each time.
        self._torch_threads = torch.get_num_threads()

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds from a prompt to its first token, computed in one step."""
        torch.set_num_threads(self._torch_threads)
        started = time.perf_counter()
        self._step([prompt], [0])
        return time.perf_counter() - started

    def decode(self, prompts: Prompts, new_tokens: int) -> tuple[float, Prompts]:
        """Return the seconds per decode step of all prompts, and the tokens. The prefill step is excluded."""
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

    def weight_bytes(self) -> int:
        """Return 0: the bytes that a decode step reads are not reported if both sides are engines."""
        return 0

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of the KV cache for `tokens` tokens."""
        return tokens * self._runner.cache.page_bytes // self._runner.page_tokens

    def _step(self, pieces: Prompts, starts: list[int]) -> list[int]:
        share = self._runner.cache.pages // len(pieces)
        rows = [
            StepRow(piece, start, range(number * share, (number + 1) * share), SamplingInput(_GREEDY, 0))
            for number, (piece, start) in enumerate(zip(pieces, starts, strict=True))
        ]
        return [token for token in self._runner.run(StepBatch(rows)).token_ids if token is not None]


Peer = Engine | TransformersPeer


def compare(engine: Engine, peer: Peer, settings: Settings) -> list[Comparison]:
    """Compare all quantities, after one unmeasured call of each side."""
    compared = []
    for batch in settings.batches:
        prompts = random_prompts(batch, settings.prompt, engine.vocab_size)
        engine_s, peer_s, same = _decode_turns(engine, peer, prompts, settings)
        kv = batch * engine.kv_bytes(settings.prompt + settings.new_tokens // 2)
        read = peer.weight_bytes() + kv if peer.weight_bytes() else 0
        compared.append(Comparison(f"decode_ratio_b{batch}", engine_s, peer_s, read, same))
    (prompt,) = random_prompts(1, settings.prefill, engine.vocab_size)
    turns = take_turns(lambda: engine.prefill(prompt), lambda: peer.prefill(prompt), settings.rounds)
    compared.append(Comparison(f"prefill_ratio_{settings.prefill}", *turns))
    return compared


def _decode_turns(
    engine: Engine, peer: Peer, prompts: Prompts, settings: Settings
) -> tuple[list[float], list[float], str]:
    answers: dict[str, Prompts] = {}

    def turn(side: Peer, name: str) -> float:
        seconds, answers[name] = side.decode(prompts, settings.new_tokens)
        return seconds

    engine_s, peer_s = take_turns(lambda: turn(engine, "engine"), lambda: turn(peer, "peer"), settings.rounds)
    same = sum(a == b for a, b in zip(answers["engine"], answers["peer"], strict=True))
    return engine_s, peer_s, f"{same} of {len(prompts)}"


def take_turns(engine: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Return the results of `rounds` calls of each side in alternation, after one unmeasured call of each."""
    engine(), peer()
    engine_results, peer_results = [], []
    for _ in range(rounds):
        engine_results.append(engine())
        peer_results.append(peer())
    return engine_results, peer_results


def random_prompts(batch: int, tokens: int, vocab_size: int) -> Prompts:
    """Return `batch` prompts of `tokens` random token ids each, the same in every call."""
    generator = torch.Generator().manual_seed(batch)
    prompts: Prompts = torch.randint(3, vocab_size, (batch, tokens), generator=generator).tolist()
    return prompts


def load(folder: Path, dtype: str, threads: int) -> Engine:
    """Load the engine from a model folder."""
    return Engine(ModelRunner.load(EngineConfig.of(folder, dtype=dtype, threads=threads)))


def compare_sides(engine: Engine, peer: Peer, threads: int, settings: Settings) -> tuple[list[Comparison], float]:
    """Return the comparisons, and the higher of the read bandwidths measured before and after them, in GB/s."""
    bandwidth = read_bandwidth(threads)
    compared = compare(engine, peer, settings)
    return compared, max(bandwidth, read_bandwidth(threads))


def print_table(peer: str, dtype: str, compared: Sequence[Comparison], bandwidth: float) -> None:
    """Print the median and the best round of both sides."""
    print(f"\n{dtype}; plain read {bandwidth:.1f} GB/s; milliseconds a decode step or a prefill: median (best)")
    for comparison in compared:
        engine_s, peer_s = statistics.median(comparison.engine), statistics.median(comparison.peer)
        share = comparison.bytes_read / engine_s / 1e9
        print(
            f"  {comparison.name:18} engine {engine_s * 1e3:8.2f} ({min(comparison.engine) * 1e3:.2f})"
            f"  {peer} {peer_s * 1e3:8.2f} ({min(comparison.peer) * 1e3:.2f})  ratio {comparison.ratio:.2f}"
            + (f"  reads {share:.1f} GB/s = {share / bandwidth:.0%}" if comparison.bytes_read else "")
            + (f"  same tokens {comparison.same_tokens}" if comparison.same_tokens else "")
        )


def as_result(compared: Sequence[Comparison], bandwidth: float, suffix: str) -> dict[str, object]:
    """Return the ratios, and the times from which they are computed, as JSON; `suffix` is appended to their names."""
    result: dict[str, object] = {comparison.name + suffix: round(comparison.ratio, 3) for comparison in compared}
    for comparison in compared:
        name = comparison.name.replace("ratio_", "") + suffix
        result[f"{name}_engine_ms"] = [round(seconds * 1e3, 3) for seconds in comparison.engine]
        result[f"{name}_peer_ms"] = [round(seconds * 1e3, 3) for seconds in comparison.peer]
        if comparison.bytes_read:
            result[f"{name}_gb_per_s"] = round(comparison.bytes_read / statistics.median(comparison.engine) / 1e9, 2)
            result[f"{name}_same_tokens"] = comparison.same_tokens
    return result | {f"read_gb_per_s{suffix}": round(bandwidth, 2)}


def measure(options: argparse.Namespace) -> Measured:
    """Compare both sides in one dtype or both.

    Raises InvalidArgument if quantized weights are to be compared but the model has none.
    """
    file = options.model or find_default_model()
    folder = prepare_model(file)
    settings = Settings(
        prompt=options.prompt_tokens,
        new_tokens=options.new_tokens,
        prefill=options.prefill_tokens,
        rounds=options.rounds,
    )
    result: dict[str, object] = {}
    if options.peer == "bfloat16":
        codes = prepare_model(file, codes=True)
        if codes == folder:
            raise InvalidArgument("--model", f"{file} has no codes that are served as they are; take a quantized GGUF.")
        sides = [load(path, "bfloat16", options.threads) for path in (codes, folder)]
        compared, bandwidth = compare_sides(sides[0], sides[1], options.threads, settings)
        print_table(options.peer, "codes", compared, bandwidth)
        result |= as_result(compared, bandwidth, "") | {"model": file.stem, "dtype": "bfloat16"}
        return f"codes-{file.stem}", result | {"threads": options.threads, **run_facts("cpu")}
    for dtype in DTYPES if options.dtype == "both" else (options.dtype,):
        engine, peer = load(folder, dtype, options.threads), TransformersPeer(folder, dtype, options.threads)
        compared, bandwidth = compare_sides(engine, peer, options.threads, settings)
        print_table(options.peer, dtype, compared, bandwidth)
        suffix = "_bf16" if options.dtype == "both" and dtype == "bfloat16" else ""
        result |= as_result(compared, bandwidth, suffix)
    name = NAME if options.model is None else folder.name
    result |= {"model": name, "dtype": options.dtype, "threads": options.threads, **run_facts("cpu")}
    return f"engine-{name}", result


@njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator]
def _sum(values: Any) -> Any:
    total = np.float32(0)
    for i in range(len(values)):
        total += values[i]
    return total


def read_bandwidth(threads: int, rounds: int = 7) -> float:
    """Return the total read bandwidth of `threads` threads in GB/s: the best of `rounds` measurements."""
    values = np.ones(_BYTES // 4, dtype=np.float32)
    parts = np.array_split(values, threads)
    _sum(parts[0][:16])
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            started = time.perf_counter()
            list(pool.map(_sum, parts))
            best = min(best, time.perf_counter() - started)
    return values.nbytes / best / 1e9
