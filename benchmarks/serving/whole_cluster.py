"""Compares a whole cluster with its own engine: `python -m benchmarks.serving --device cpu`.

The same eight greedy requests (same prompts, same answer length) run through the router of a cluster and through the
engine alone in this process. Rounds of the two alternate, and medians are compared. Both sides compute every prompt
token and every answer token; the difference is the cost of serving.

`cluster_efficiency_b8` is the cluster's tokens per second / the engine's.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster import add_model_options, choose_model
from benchmarks.command_line import Measured, at_least
from benchmarks.engine.gpu_engine import GpuEngine
from benchmarks.results import run_facts
from tandem.client import AsyncClient
from tandem.cluster.launcher import Cluster
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import RequestRef, SamplingParams
from tandem.settings.cluster import ClusterSettings

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of equal length, each answered with `new_tokens` tokens."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Answer tokens of one round."""
        return len(self.prompts) * self.new_tokens


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over the workload: answer tokens per second, and the answers for comparison.

    `decoding` is the tokens per second while all streams decode: from the first token of the last stream that starts
    until the first stream ends. 0 = not measured.
    """

    tokens_per_second: float
    answers: tuple[tuple[int, ...], ...]
    decoding: float = 0.0


def make_workload(streams: int, prompt_tokens: int, new_tokens: int) -> Workload:
    """Return fixed token ids, different for every prompt."""
    prompts = tuple(tuple(1000 + (17 * s + 131 * i) % 20000 for i in range(prompt_tokens)) for s in range(streams))
    return Workload(prompts, new_tokens)


def decode_rate(runner: ModelRunner, workload: Workload) -> float:
    """Return the tokens per second of the engine alone, decoding all streams over the same positions as the cluster."""
    engine = GpuEngine(runner)
    batch, context = len(workload.prompts), len(workload.prompts[0]) + workload.new_tokens // 2
    return batch / engine.decode_seconds(batch, context, steps=workload.new_tokens // 2)


def engine_round(runner: ModelRunner, workload: Workload, max_step_tokens: int) -> Round:
    """Prefill in steps of at most `max_step_tokens`, then decode all streams together."""
    sampling = SamplingParams(max_tokens=workload.new_tokens, ignore_eos=True)
    total = len(workload.prompts[0]) + workload.new_tokens
    refs = [RequestRef(f"alone-{i}", 1) for i in range(len(workload.prompts))]
    pages = [runner.pool.allocate(ref, runner.kv_pages.numbers(total) * runner.kv_pages.groups) for ref in refs]
    answers: list[list[int]] = [[] for _ in refs]
    started = time.perf_counter()
    at_once = max(1, max_step_tokens // len(workload.prompts[0]))
    for first in range(0, len(refs), at_once):
        group = range(first, min(first + at_once, len(refs)))
        rows = [StepRow(workload.prompts[i], 0, pages[i], SamplingInput(sampling, 0)) for i in group]
        for i, token in zip(group, runner.run(StepBatch(rows)).token_ids, strict=True):
            answers[i].append(_drawn(token))
    for index in range(1, workload.new_tokens):
        start = len(workload.prompts[0]) + index - 1
        rows = [StepRow([a[-1]], start, p, SamplingInput(sampling, index)) for a, p in zip(answers, pages, strict=True)]
        for answer, token in zip(answers, runner.run(StepBatch(rows)).token_ids, strict=True):
            answer.append(_drawn(token))
    seconds = time.perf_counter() - started
    for ref, owned in zip(refs, pages, strict=True):
        runner.pool.free(ref, owned)
    return Round(workload.tokens / seconds, tuple(map(tuple, answers)))


def _drawn(token: int | None) -> int:
    if token is None:
        raise RuntimeError("the engine drew no token for a row that must draw one")
    return token


async def cluster_round(address: str, workload: Workload) -> Round:
    """Send all requests at once over one connection; the round ends with the last answer."""
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        started = time.perf_counter()
        answers = await asyncio.gather(*(_ask(client, prompt, workload.new_tokens) for prompt in workload.prompts))
        seconds = time.perf_counter() - started
    begin, end = max(a[0][0] for a in answers), min(a[-1][0] for a in answers)
    decoded = sum(len(ids) for a in answers for moment, ids in a if begin < moment <= end)
    tokens = tuple(tuple(token for _, ids in a for token in ids) for a in answers)
    return Round(workload.tokens / seconds, tokens, decoded / (end - begin) if end > begin else 0.0)


async def _ask(client: AsyncClient, prompt: Sequence[int], new_tokens: int) -> list[tuple[float, Sequence[int]]]:
    """Return the arrival time and the tokens of each chunk."""
    stream = client.stream_generate(prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True)
    return [(time.perf_counter(), chunk.token_ids) async for chunk in stream if chunk.token_ids]


def compare(
    runner: ModelRunner, cluster: Cluster, workload: Workload, rounds: int, max_step_tokens: int
) -> dict[str, object]:
    """Alternate engine and cluster after one unmeasured round of each, and return the medians and their ratio."""
    address = cluster.endpoints.grpc
    engine_round(runner, workload, max_step_tokens)
    asyncio.run(cluster_round(address, workload))
    alone, served = [], []
    for number in range(1, rounds + 1):
        alone.append(engine_round(runner, workload, max_step_tokens))
        served.append(asyncio.run(cluster_round(address, workload)))
        print(
            f"round {number}: engine {alone[-1].tokens_per_second:7.1f} tokens/s,"
            f" cluster {served[-1].tokens_per_second:7.1f} tokens/s",
            flush=True,
        )
    engine = statistics.median(r.tokens_per_second for r in alone)
    through = statistics.median(r.tokens_per_second for r in served)
    same = sum(a == b for a, b in zip(alone[-1].answers, served[-1].answers, strict=True))
    streams = len(workload.prompts)
    decoding: dict[str, object] = {}
    if runner.asynchronous:
        engine_rate, cluster_rate = decode_rate(runner, workload), statistics.median(r.decoding for r in served)
        decoding = {
            f"cluster_decode_ratio_b{streams}": round(cluster_rate / engine_rate, 4),
            "engine_decode_tokens_per_s": round(engine_rate, 1),
            "cluster_decode_tokens_per_s": round(cluster_rate, 1),
        }
    return decoding | {
        f"cluster_efficiency_b{streams}": round(through / engine, 4),
        "engine_tokens_per_s": round(engine, 1),
        "cluster_tokens_per_s": round(through, 1),
        "engine_rounds": [round(r.tokens_per_second, 1) for r in alone],
        "cluster_rounds": [round(r.tokens_per_second, 1) for r in served],
        "identical_answers": f"{same} of {streams}",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="auto")
    add_model_options(parser)
    parser.add_argument("--memory-fraction", type=float, default=0.28, help="of a GPU, for the engine and each worker")
    parser.add_argument("--streams", type=at_least(1), default=8)
    parser.add_argument("--prompt-tokens", type=at_least(1), default=128)
    parser.add_argument("--new-tokens", type=at_least(1), default=256)
    parser.add_argument("--rounds", type=at_least(1), default=5)


def measure(arguments: argparse.Namespace) -> Measured:
    """Start a cluster, load the engine in this process, and measure both."""
    model = choose_model(arguments.model, arguments.shape)
    engine = EngineConfig.of(
        model.folder,
        device=arguments.device,
        dtype=arguments.dtype,
        max_batch_requests=max(64, arguments.streams),
        memory_fraction=arguments.memory_fraction,
        random_weights=model.random_weights,
    )
    config = ClusterSettings.of(
        model.folder,
        max_batch_requests=engine.max_batch_requests,
        memory_fraction=arguments.memory_fraction,
        random_weights=model.random_weights,
        max_step_tokens=engine.max_step_tokens,
        served_model_names=(model.name,),
        device=arguments.device,
        dtype=arguments.dtype,
        grpc_port=0,
        http_port=0,
        prefix_cache=False,
    )
    workload = make_workload(arguments.streams, arguments.prompt_tokens, arguments.new_tokens)
    runner = ModelRunner.load(engine)
    cluster = Cluster.start(config)
    try:
        result = compare(runner, cluster, workload, arguments.rounds, engine.max_step_tokens)
    finally:
        cluster.stop()
    result |= {
        "model": model.name,
        "dtype": runner.facts.dtype,
        "streams": arguments.streams,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        **run_facts(arguments.device),
    }
    return f"serving-{model.name}", result
