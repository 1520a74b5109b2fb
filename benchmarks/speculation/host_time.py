"""Measures the host's work between two steps with drafts: `python -m benchmarks.speculation.host_time`.

A real worker with n-gram drafts runs over an engine that packs steps as for a GPU and computes nothing. A step with
drafts is launched when the tokens of the last one are here, so the device idles from the end of a step's wait until the
next one is packed. That time is measured, as elapsed time and as CPU time of the engine thread, with a fixed number of
drafts and with as many as the worker chooses. The time is what steps without drafts hide behind the device.

With `--against TREE`, another checkout runs the same cases in turns with this one, each in a process of its own; given
are then both, and the ratio of the medians. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import at_least, exit_on_error
from benchmarks.cpu.no_engine import MODEL, STEP_TOKENS, NoEngine
from benchmarks.cpu.stopwatch import Stopwatch
from benchmarks.results import run_facts, save_result
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.config import GPU_PAGE_TOKENS, EngineConfig
from tandem.engine.cuda.sampler_cuda import DeviceSampler
from tandem.engine.cuda.verify_graphs import verify_sizes
from tandem.engine.steps.batch import ModelRunnerOutput, PendingStep, StepBatch, rows_of
from tandem.engine.steps.draft_groups import fill_draft_groups
from tandem.engine.steps.step_buffer import StepLimits, StepSizes
from tandem.engine.steps.step_packer import StepPacker
from tandem.protocol import conversion
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.messages import (
    Destination,
    ModelFacts,
    PeerRef,
    PrefillTask,
    RequestRef,
    Reservation,
    Role,
    SamplingParams,
)
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.worker.config import WorkerConfig
from tandem.worker.router_stream import RouterStream
from tandem.worker.worker import Worker

ME, ROUTER = PeerRef("both-0", 1), "router"
CASES = {1: 4, 8: 3, 32: 3, 64: 2, 128: 1}
"""Requests, and the fixed number of drafts of each."""
ALPHA = 0.7
"""The probability that a draft is accepted."""
CONTEXT = 8192
FACTS = replace(MODEL, max_context=CONTEXT)
PROMPT = 1000
FIRST_TOKEN = 100
"""The prompts are the tokens from here on, in order, so that each has one that follows it."""
STEP_S, DRAFT_S = 6e-3, 5e-6
"""The seconds of a step, and what each draft adds."""
WARM_UP = 60
"""Steps with drafts before those that are counted."""
TURNS = 3
MOST_STEPS = 4
"""The steps, with drafts and without, after which a case ends, for each step that is to be counted."""
FEWEST = 20
"""The steps with drafts below which a case is left out, as drafts do not pay in it."""
LOW = 0.1
"""The quantile that shows a gap without other load of the cores."""
_HOURS = 1e4
_LOOK_S = 0.01


class _FourHeads:
    """Attention with 4 query heads for each key head; see `Kernels.draft_group_rows`."""

    def draft_group_rows(self, drafts: int) -> int:
        """Returns the most rows of a group in steps of so many drafts."""
        return 4 if drafts <= 3 else 8


@dataclass
class DraftingEngine(NoEngine):
    """Draws the token behind each row's own in the order of the prompts with probability ALPHA, else another one."""

    facts: ModelFacts = FACTS
    cost_guess = CostParameters(base_s=STEP_S, row_s=DRAFT_S)
    gaps: list[tuple[float, float, int]] = field(default_factory=list)
    """For each step with drafts that was launched with nothing in flight: CPU µs, elapsed µs and its rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._packer = StepPacker(StepLimits(MODEL.vocab_size, CONTEXT, len(self.memory), GPU_PAGE_TOKENS))
        self._sizes = verify_sizes(_FourHeads(), self.requests, STEP_TOKENS)  # type: ignore[arg-type]
        self._dice = np.random.default_rng(0)
        self._ended: tuple[int, int] | None = None
        """CPU time and time at which the newest result was here, in ns; None once the next step was launched."""
        self._due = 0.0
        self._newest = np.zeros(0, dtype=np.int64)
        """The draws of the newest step, which the next one may name."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """See `NoEngine`."""
        requests, ended = len(batch.tokens.newest), self._ended
        self._pack(batch, requests)
        if ended is not None and len(batch) > requests and not batch.chunks:
            cpu, clock = time.thread_time_ns() - ended[0], time.perf_counter_ns() - ended[1]
            self.gaps.append((cpu / 1e3, clock / 1e3, len(batch)))
        self._ended = None
        self.rows.append(len(batch))
        due = self._due = max(self._due, time.monotonic()) + self.step_s + DRAFT_S * (len(batch) - requests)
        drawn = self._newest = self._draw(batch)

        def result() -> ModelRunnerOutput:
            time.sleep(max(0.0, due - time.monotonic()))
            self._ended = time.thread_time_ns(), time.perf_counter_ns()
            return rows_of(drawn.tolist(), batch)

        return result

    def _pack(self, batch: StepBatch, requests: int) -> None:
        sizes = self._packer.sizes(batch)
        draws = batch.draws
        fitting = (size for size in self._sizes if size.rows >= len(batch) and size.requests >= requests)
        size = next(fitting, None) if len(batch) > requests and not batch.chunks else None
        if size is not None:
            rows = size.rows
            sizes = StepSizes(rows, rows, self._packer.limits.pages_of(CONTEXT), rows)
            words = self._words[: sizes.words + size.groups.words]
            self._packer.pack(batch, sizes, words[: sizes.words])
            fill_draft_groups(batch.tokens, size.groups, words[sizes.words :])
        else:
            self._packer.pack(batch, sizes, self._words[: sizes.words])
        if not draws.greedy:
            DeviceSampler.plan(draws, None, self._params[: len(draws)])

    def _draw(self, batch: StepBatch) -> Any:
        count = len(batch.draws)
        drawn = self._dice.integers(FIRST_TOKEN, FIRST_TOKEN + PROMPT - 1, count)
        tokens, sources = batch.tokens.columns.token_ids, batch.tokens.columns.sources
        if len(self._newest):
            tokens = np.where(sources < 0, tokens, self._newest[sources])
        follows = self._dice.random(len(tokens)) < ALPHA
        behind = FIRST_TOKEN + (tokens - FIRST_TOKEN + 1) % (PROMPT - 1)
        drawn[: len(tokens)] = np.where(follows, behind, drawn[: len(tokens)])
        return drawn


async def measure(requests: int, drafts: int | None, steps: int, temperature: float) -> list[tuple[float, float, int]]:
    """Return `DraftingEngine.gaps` of `steps` steps in which all requests run; `drafts` of each, None = what pays."""
    answer = CONTEXT - PROMPT
    pages = requests * (CONTEXT // GPU_PAGE_TOKENS + 1) + 64
    engine, fabric = DraftingEngine(PagePool(pages), Stopwatch(), STEP_S, requests), InMemoryFabric()
    config = WorkerConfig(
        ME.worker_id,
        Role.BOTH,
        EngineConfig(Path("none"), max_step_tokens=STEP_TOKENS, max_batch_requests=requests, draft_graphs=True),
        kv_lease_s=_HOURS,
        attach_grace_s=_HOURS,
        kv_checksum_rate=0.0,
        speculate=SpeculationMethod.NGRAM,
    )
    tested = Worker(
        config, ME, engine, engine.layout, lambda notice: InMemoryTransport(fabric, engine.layout, ME, notice)
    )
    speculation = tested._halves.decode.speculation
    assert speculation is not None
    speculation.fixed_drafts = drafts
    reader = asyncio.ensure_future(_read(tested.attach(ROUTER)))
    tested.start()
    try:
        sampling = SamplingParams(answer, temperature, ignore_eos=True)
        for number in range(requests):
            _send(tested, f"d{number}", sampling)
        while tested.report.load().decode_requests < requests:  # noqa: ASYNC110 - the worker has no event for it
            await asyncio.sleep(_LOOK_S)
        engine.gaps.clear()
        engine.rows.clear()
        while len(engine.gaps) < WARM_UP + steps:
            await asyncio.sleep(_LOOK_S)
            if tested.died.done():
                raise tested.died.result()
            if len(engine.rows) > MOST_STEPS * (WARM_UP + steps):
                break  # drafts hardly ever pay
    finally:
        await tested.close()
        fabric.close()
        await reader
    return engine.gaps[WARM_UP : WARM_UP + steps]


async def _read(stream: RouterStream) -> None:
    """Reads the stream like the servicer, until it ends."""
    async for message in stream.messages():
        conversion.step_output_to_proto(message).SerializeToString()


def _send(tested: Worker, name: str, sampling: SamplingParams) -> None:
    first = random.Random(name).randrange(PROMPT - 1)
    prompt = tuple(FIRST_TOKEN + (first + n) % (PROMPT - 1) for n in range(PROMPT))
    ref = RequestRef(name, 1)
    lease = tested.reserve(Reservation(ROUTER, ref, prompt, sampling, ME)).lease
    tested.prefill(PrefillTask(ROUTER, ref, prompt, sampling, Destination(ME, "", lease)))


def figures(gaps: Sequence[tuple[float, float, int]]) -> dict[str, float]:
    """Return the medians and the low quantiles of gaps in µs, and the mean rows of a step."""
    cpu, clock, rows = np.array(gaps).T
    return {
        "cpu_us": round(float(np.median(cpu)), 1),
        "cpu_us_low": round(float(np.quantile(cpu, LOW)), 1),
        "clock_us": round(float(np.median(clock)), 1),
        "clock_us_low": round(float(np.quantile(clock, LOW)), 1),
        "rows": round(float(rows.mean()), 1),
    }


def run(requests: Sequence[int], steps: int, temperature: float) -> dict[str, dict[str, float]]:
    """Measures all cases of this tree."""
    found = {}
    for each in requests:
        for name, drafts in ((f"{each} requests, {CASES.get(each, 3)} drafts", CASES.get(each, 3)), (f"{each}", None)):
            key = name if drafts is not None else f"{each} requests, drafts as they pay"
            gaps = asyncio.run(measure(each, drafts, steps, temperature))
            if len(gaps) >= FEWEST:
                found[key] = figures(gaps)
    return found


def compare(tree: Path, chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Runs this tree and another one in turns; returns the medians over the turns and their ratios."""
    here = Path(__file__).resolve().parents[2]
    options = [f"--steps={chosen.steps}", f"--temperature={chosen.temperature}", "--requests", *chosen.requests]
    seen: dict[Path, list[dict[str, dict[str, float]]]] = {here: [], tree: []}
    for turn in range(TURNS):
        for each in (here, tree) if turn % 2 else (tree, here):
            command = [sys.executable, "-P", __file__, *map(str, options)]
            environment = os.environ | {"PYTHONPATH": str(each)}
            done = subprocess.run(command, cwd=each, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{each} could not be measured: {done.stderr.strip()[-2000:]}")
            seen[each].append(json.loads(done.stdout.splitlines()[-1])["cases"])
    found = {}
    every = [*seen[here], *seen[tree]]
    for case in [name for name in every[0] if all(name in each for each in every)]:
        found[case] = {"rows": seen[here][0][case]["rows"]}
        for name in ("cpu_us", "clock_us", "clock_us_low"):
            mine, others = (statistics.median(each[case][name] for each in seen[some]) for some in (here, tree))
            found[case] |= {name: mine, f"{name}_against": others, f"{name}_ratio": round(mine / others, 3)}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the measurement, prints it, and saves it with --save."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation.host_time", description=description)
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=list(CASES), help="that decode")
    parser.add_argument("--steps", type=at_least(1), default=300, help="that are counted in each case (300)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests (0)")
    parser.add_argument("--against", type=Path, help="another checkout, which is measured in turns with this one")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    chosen = parser.parse_args(arguments)
    with exit_on_error():
        if chosen.against is None:
            cases = run(chosen.requests, chosen.steps, chosen.temperature)
        else:
            cases = compare(chosen.against.resolve(), chosen)
    for name, case in cases.items():
        print(f"{name:36}", *(f"{key} {value:g}" for key, value in case.items()), flush=True)
    facts = {"dtype": "none", "alpha": ALPHA, "step_ms": STEP_S * 1e3, "prompt": PROMPT, "steps": chosen.steps}
    result = run_facts("cpu") | facts | {"cases": cases}
    if chosen.save:
        print(f"saved {save_result('speculation-host-time', result)}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
