"""Measures the cost of metrics: `python -m benchmarks.metrics_cost`, or `--device cuda --shape llama-3-8b` on a GPU.

One worker decodes a full batch with its real engine. Metrics are on and off in turns of some steps each, within one run
and for the same requests, and are scraped once a second while they are on. Neighbouring turns are compared, so that
other load of the machine affects both. The last line is one JSON object with `ratio`: decode tokens per second with
metrics / without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.command_line import exit_on_error, need_gpu
from benchmarks.load.served_model import ServedModel, add_model_options, choose_model
from benchmarks.results import run_facts, save_result
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from tandem.cost_model.step_work import StepWork
from tandem.engine.cache.paged_cache import cache_bytes
from tandem.engine.config import EngineConfig
from tandem.engine.device import parse_device, parse_dtype, parse_page_tokens
from tandem.engine.memory import GIB
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.metrics.exposition import Exposition
from tandem.protocol.ending import pages_for
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Destination, PeerRef, PrefillTask, RequestRef, Reservation, Role, SamplingParams
from tandem.worker.config import WorkerConfig
from tandem.worker.process import layout_of
from tandem.worker.reporting.metrics import engine_facts, worker_facts
from tandem.worker.worker import Worker

ME, ROUTER = PeerRef("both-0", 1), "router"
PROMPT = 64
_WARM_TURNS = 2
_BETWEEN_STEPS = 8
"""Maximum number of steps assumed to pass between two turns."""
_STEP_TOKENS = 2048
_CPU_REQUESTS, _GPU_REQUESTS = 8, 128
_HOURS = 1e4
_LOOK_S, _SCRAPE_S = 0.002, 1.0
_RESAMPLES = 4000
SURE = 0.005
"""Standard error of the ratio above which a run cannot resolve one percent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`turns` of `steps` steps each, alternately on and off, with a batch of `requests`."""

    requests: int
    steps: int
    turns: int

    @property
    def answer(self) -> int:
        """Tokens of each request, enough for all turns; requests that start first decode longer."""
        return (self.steps + _BETWEEN_STEPS) * (self.turns + _WARM_TURNS) + 4 * self.requests + 64

    def kv_pages(self, page_tokens: int, max_context: int) -> int:
        """Returns the size of a pool that can reserve pages for all answers in full.

        A worker of both roles keeps the longest prompt's pages back, but at most half of the pool.
        """
        promised = self.requests * pages_for(PROMPT + self.answer, page_tokens)
        return promised + min(promised, pages_for(max_context, page_tokens))


class Turns:
    """Receives each step like metrics do, and measures a turn's tokens. Engine thread, except for `run`."""

    def __init__(self, tested: Worker, requests: int) -> None:
        self._tested = tested
        self._requests = requests
        self._meter = tested._meter
        self._metrics = tested.metrics.step
        self._tokens = self._steps = self._left = 0
        self._began = self._ended = 0.0

    async def run(self, steps: int, *, on: bool) -> float:
        """Returns decode tokens per second of `steps` steps, from the end of the step before them.

        RuntimeError if a request ends before, since a full batch is compared.
        """
        self._tokens, self._steps = 0, -1
        self._left = steps
        self._meter.on_step = self._both if on else self._count
        while self._steps < steps:
            await asyncio.sleep(_LOOK_S)
            if self._tested.report.load().decode_requests < self._requests:
                raise RuntimeError("an answer ended before the last turn did: this machine is busy; try again")
        return self._tokens / (self._ended - self._began)

    def _count(self, work: StepWork, _seconds: float, _predicted_s: float) -> None:
        if self._steps >= self._left:
            return
        self._ended = time.perf_counter()
        self._steps += 1
        if self._steps:
            self._tokens += work.decode_rows
        else:
            self._began = self._ended

    def _both(self, work: StepWork, seconds: float, predicted_s: float) -> None:
        self._count(work, seconds, predicted_s)
        self._metrics(work, seconds, predicted_s)


class Scraper:
    """Scrapes like the metrics listener does, after each second in which it runs."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._wait_s = _SCRAPE_S

    async def run(self) -> None:
        """Scrapes until cancelled; the next call continues the interrupted second."""
        while True:
            began = time.monotonic()
            try:
                await asyncio.sleep(self._wait_s)
            except asyncio.CancelledError:
                self._wait_s = max(0.0, self._wait_s - (time.monotonic() - began))
                raise
            self._wait_s = _SCRAPE_S
            await asyncio.to_thread(self._exposition.render)


async def measure(engine: ModelRunner, settings: EngineConfig, plan: Plan) -> list[tuple[float, float]]:
    """Returns tokens per second (with, without) metrics for each pair of turns."""
    context = engine.facts.max_context
    if PROMPT + plan.answer > context:
        raise InvalidArgument("--turns", f"need answers of {plan.answer} tokens and the model's context is {context}")
    fabric, layout = InMemoryFabric(), layout_of(engine.cache)
    config = WorkerConfig(
        ME.worker_id,
        Role.BOTH,
        settings,
        kv_lease_s=_HOURS,
        attach_grace_s=_HOURS,
        kv_checksum_rate=0.0,
        prefix_cache=False,
    )
    tested = Worker(config, ME, engine, layout, lambda notice: InMemoryTransport(fabric, layout, ME, notice))
    tested.metrics.registry.read(partial(worker_facts, tested.report, tested.transport))
    tested.metrics.registry.read(partial(engine_facts, engine, lambda: Role.BOTH.value))
    tested.start()
    try:
        return await _turns(tested, plan)
    finally:
        await tested.close()
        fabric.close()


async def _turns(tested: Worker, plan: Plan) -> list[tuple[float, float]]:
    await _decode_all(tested, plan)
    turns, scraper = Turns(tested, plan.requests), Scraper(Exposition(tested.metrics.registry))

    async def one(*, on: bool) -> float:
        scraping = asyncio.create_task(scraper.run()) if on else None
        rate = await turns.run(plan.steps, on=on)
        if scraping is not None:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)
        return rate

    for warm in range(_WARM_TURNS):
        await one(on=bool(warm % 2))
    pairs = []
    for number in range(plan.turns // 2):
        first = await one(on=bool(number % 2))
        second = await one(on=not number % 2)
        pairs.append((first, second) if number % 2 else (second, first))
    return pairs


async def _decode_all(tested: Worker, plan: Plan) -> None:
    """Sends all requests, and waits until they are in the batch."""
    sampling = SamplingParams(max_tokens=plan.answer, ignore_eos=True)
    for number in range(plan.requests):
        ref, prompt = (
            RequestRef(f"r{number}", 1),
            tuple((number + each) % tested.facts.vocab_size for each in range(PROMPT)),
        )
        lease = tested.reserve(Reservation(ROUTER, ref, prompt, sampling, ME)).lease
        tested.prefill(PrefillTask(ROUTER, ref, prompt, sampling, Destination(ME, "", lease)))
    while tested.report.load().decode_requests < plan.requests:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


def figures(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Returns tokens per second and their ratio, the median of the pairs, with its standard error, for JSON.

    The error is the deviation of medians of as many pairs drawn from these (bootstrap, Efron, Annals of Statistics
    1979).
    """
    ratios = np.array([on / off for on, off in pairs])
    drawn = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
    error = float(np.median(drawn, axis=1).std())
    return {
        "tokens_per_s_on": round(statistics.median(on for on, _ in pairs), 1),
        "tokens_per_s_off": round(statistics.median(off for _, off in pairs), 1),
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_standard_error": round(error, 4),
    }


def engine_settings(model: ServedModel, device: str, plan: Plan) -> EngineConfig:
    """Returns settings with a KV pool that holds the whole plan."""
    settings = EngineConfig(
        model.folder,
        device=device,
        random_weights=model.random_weights,
        max_step_tokens=max(_STEP_TOKENS, 4 * plan.requests),
        max_batch_requests=plan.requests,
    )
    where = parse_device(device)
    page_tokens, shape = parse_page_tokens(settings, where), load_spec(model.folder)
    pages = plan.kv_pages(page_tokens, shape.max_context)
    return replace(settings, kv_cache_bytes=cache_bytes(shape, pages, page_tokens, parse_dtype(settings, where, shape)))


def load_engine(settings: EngineConfig, name: str, plan: Plan) -> ModelRunner:
    """Loads the engine. InvalidArgument, with options to reduce, where the device has too little memory."""
    try:
        return ModelRunner.load(settings, name=name)
    except InvalidArgument as error:
        if error.field != "kv_cache_bytes":
            raise
        asked = f"answers of {plan.answer} tokens each need {(settings.kv_cache_bytes or 0) / GIB:.1f} GiB of KV pages"
        message = f"{asked}, for which {settings.device} has too little memory; take fewer of them, --turns or --steps"
        raise InvalidArgument("--requests", message) from error


def _run(model: ServedModel, chosen: argparse.Namespace) -> dict[str, Any]:
    plan = Plan(chosen.requests, chosen.steps, chosen.turns)
    settings = engine_settings(model, chosen.device, plan)
    engine = load_engine(settings, model.name, plan)
    found = figures(asyncio.run(measure(engine, settings, plan)))
    sizes = {"model": model.name, "requests": plan.requests, "steps": plan.steps, "turns": plan.turns}
    return run_facts(chosen.device) | {"dtype": engine.facts.dtype, **sizes, **found}


def main() -> None:
    """Runs the measurement, prints it, and saves it with --save."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics_cost", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    add_model_options(parser)
    parser.add_argument("--requests", type=int, default=None, help="that decode; default: 8, on GPUs 128")
    parser.add_argument("--steps", type=int, default=20, help="of each turn")
    parser.add_argument("--turns", type=int, default=96, help="half of them with metrics")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    chosen = parser.parse_args()
    on_cpu = chosen.device == "cpu"
    if not on_cpu:
        need_gpu()
    chosen.requests = chosen.requests or (_CPU_REQUESTS if on_cpu else _GPU_REQUESTS)
    with exit_on_error():
        result = _run(choose_model(chosen.model, chosen.shape), chosen)
    if chosen.save:
        print(f"saved {save_result('metrics-cost', result)}")
    if result["ratio_standard_error"] > SURE:
        print(f"the standard error is above {SURE:.1%}: this machine has other load; take more --turns")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
