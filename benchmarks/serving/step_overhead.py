"""Measures the host's cost of a step: `python -m benchmarks.serving steps`.

A real worker, with both schedulers, loop, cache, leases, output streams and the packer of a GPU's steps, runs over an
engine that computes nothing. Every step lasts as long as one of an 8B model on a large GPU, according to a saved run. A
router reads the worker's stream. The loop's thread does these parts of a step:

      plan     choose the requests of the step and their rows
      pack     copy rows and sampling parameters to the host memory that goes to the device
      results  turn tokens into answers and events, and update the cost model with the step's time
      streams   pass the events to the event loop

The event loop's thread sends the events (`send`). Both CPU time and elapsed time are given: they differ by other load
of the machine and by the other thread, because only one of the two runs at a time. First all requests decode, greedily
and sampled; then prompts join them, under each policy; then answers end as well and other requests replace them, so
that the batch changes in most steps.

The last case, `close decode`, has steps of half a millisecond: the same work while the core's caches stay warm between
two steps. The difference to the other cases is due to cache misses.

With asynchronous engines all of this happens while the device computes another step. Figures are µs per step, absolute
and as a share of the step.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from benchmarks.command_line import Measured, above_0, at_least
from benchmarks.results import RESULTS, run_facts
from benchmarks.serving.no_engine import MODEL, STEP_TOKENS, NoEngine, Stopwatch
from decode_worker.batch_snapshot import DecodedStep
from kv_transfer.in_memory import InMemoryTransport
from kv_transfer.in_memory_fabric import InMemoryFabric
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.config import EngineConfig
from tandem.protocol import conversion
from tandem.protocol.messages import Destination, PeerRef, PrefillTask, RequestRef, Reservation, Role, SamplingParams
from tandem.protocol.policy_name import PolicyName
from tandem.settings.engine import GPU_PAGE_TOKENS
from tandem.worker.config import WorkerConfig
from tandem.worker.loop import StepMeter
from tandem.worker.output_streams import OutputStream, OutputStreams
from tandem.worker.scheduler import StepScheduler
from tandem.worker.worker import Worker

PROMPT = 1000
CHANGING_ANSWER = 256
"""Answer length in cases where answers end: more tokens than there are steps until the last request has joined."""
JOINING_PROMPT = 1500
JOINING = 4
"""Number of prompts that wait at any time in cases where prompts join."""
ME = PeerRef("both-0", 1)
ROUTER = "router"
ROWS = (32, 128, 256)
CLOSE_S = 0.5e-3
"""Seconds of a step in the case `close decode`."""
STEP_S = 9.3e-3
"""Seconds of a step by default, without a saved run."""
PARTS = ("plan", "pack", "results", "streams")
"""The parts of a step in the loop's thread."""
INSIDE = {
    "plan": "StepScheduler.plan: requests that end, join or need a page, page allocation, the policy, all rows",
    "pack": "columns of rows and draws, checks, the step's host buffer, parameters and numbers of random draws",
    "results": "tokens to a list, StepScheduler.apply, columns of tokens for each router; the step's time learned",
    "streams": "OutputStreams.publish: the events, given to the event loop",
    "send": "not in `us`: the event loop's thread, from events to the bytes of one message",
    "nowhere": "launching kernels, copies to the device, gRPC's own threads, requests that arrive",
}
"""The contents of each part, which are saved with the figures."""
_RESULTS = ("drawn", "applied", "tokens", "learned")
_CLOSE = "close decode"
_OF_STEPS = ("plan", "pack", *_RESULTS, "streams")
LOW = 0.1
"""The quantile that shows a step's cost without other load on the cores."""
_LOOK_S = 0.02
_HOURS = 1e4


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of requests and steps, and the seconds per step."""

    requests: int
    steps: int
    step_s: float


async def measure_steps(
    plan: Plan, policy: PolicyName, *, joining: bool = False, changing: bool = False, temperature: float = 0.0
) -> Stopwatch:
    """Measure `plan.steps` steps with all requests running; with `joining`, prompts join them.

    With `changing`, answers end and as many other requests begin.
    """
    answer = CHANGING_ANSWER if changing else 4 * plan.steps + 400
    pages = plan.requests * (-(-(PROMPT + answer) // GPU_PAGE_TOKENS) + 1) + 2048
    watch = Stopwatch()
    engine, fabric = NoEngine(PagePool(pages), watch, plan.step_s, plan.requests), InMemoryFabric()
    config = WorkerConfig(
        ME.worker_id,
        Role.BOTH,
        EngineConfig.of(Path("none"), max_step_tokens=STEP_TOKENS, max_batch_requests=plan.requests),
        kv_lease_s=_HOURS,
        attach_grace_s=_HOURS,
        kv_checksum_rate=0.0,
        step_policy=policy,
        itl_target_s=2 * plan.step_s if joining else None,
    )
    with contextlib.ExitStack() as timed:
        for owner, method, part in _TIMED:
            timed.enter_context(watch.on(owner, method, part))
        tested = Worker(
            config, ME, engine, engine.layout, lambda notice: InMemoryTransport(fabric, engine.layout, ME, notice)
        )
        reader = asyncio.ensure_future(_read(tested.attach(ROUTER), watch))
        tested.start("")
        try:
            sampling = SamplingParams(answer, temperature, ignore_eos=True)
            await _decode_all(tested, plan, sampling)
            await asyncio.sleep(2 * plan.step_s)
            watch.spent.clear()
            engine.rows.clear()
            joined = 0
            while len(watch.spent["streams"]) < plan.steps:
                while joining and tested.report.load().prefill_requests < JOINING:
                    joined += 1
                    _send(tested, f"p{joined}", JOINING_PROMPT, SamplingParams(max_tokens=1))
                while changing and _running(tested) < plan.requests:
                    joined += 1
                    _send(tested, f"c{joined}", PROMPT, sampling)
                await asyncio.sleep(_LOOK_S)
                if not changing and min(engine.rows[: plan.steps], default=plan.requests) < plan.requests:
                    raise RuntimeError("a request ended before the steps were counted")
        finally:
            await tested.close()
            fabric.close()
            await reader
    return watch


class _Kind(TypedDict, total=False):
    """The options of `measure_steps`."""

    joining: bool
    changing: bool
    temperature: float


_TIMED = (
    (StepScheduler, "plan", "plan"),
    (StepScheduler, "apply", "applied"),
    (DecodedStep, "plain_tokens", "tokens"),
    (StepMeter, "learn", "learned"),
    (OutputStreams, "publish", "streams"),
)


async def _read(stream: OutputStream, watch: Stopwatch) -> None:
    """Read the stream as the servicer does, until it ends."""
    async for message in stream.messages():
        with watch.timing("send"):
            conversion.step_output_to_proto(message).SerializeToString()


async def _decode_all(tested: Worker, plan: Plan, sampling: SamplingParams) -> None:
    """Send all requests, and wait until all of them decode. Raises RuntimeError if one ends before."""
    for number in range(plan.requests):
        _send(tested, f"d{number}", PROMPT, sampling)
    most = 0
    while (running := tested.report.load().decode_requests) < plan.requests:
        if running < most:
            raise RuntimeError(f"an answer ended when {most} of {plan.requests} ran: take fewer steps or longer ones")
        most = running
        await asyncio.sleep(_LOOK_S)


def _running(tested: Worker) -> int:
    """Return the number of requests that decode or will decode."""
    load = tested.report.load()
    return load.decode_requests + load.prefill_requests


def _send(tested: Worker, name: str, tokens: int, sampling: SamplingParams) -> None:
    """Send a prompt with a unique prefix. If the request decodes on this worker, reserve its pages first."""
    ref, prompt = RequestRef(name, 1), (int.from_bytes(name.encode()) % MODEL.vocab_size, *range(100, 99 + tokens))
    destination = None
    if sampling.max_tokens > 1:
        lease = tested.reserve(Reservation(ROUTER, ref, prompt, sampling, ME)).lease
        destination = Destination(ME, "", lease)
    tested.prefill(PrefillTask(ROUTER, ref, prompt, sampling, destination))


def run(rows: tuple[int, ...], steps: int, step_s: float | None) -> dict[str, object]:
    """Measure all cases, and return their figures as JSON."""
    cases: dict[str, tuple[int, PolicyName, _Kind]] = {}
    cases |= {f"decode {row_count}": (row_count, PolicyName.UNCHUNKED, {}) for row_count in rows}
    cases |= {
        f"decode sampled {row_count}": (row_count, PolicyName.UNCHUNKED, {"temperature": 1.0}) for row_count in rows
    }
    cases |= {f"mixed {policy} {rows[-1]}": (rows[-1], policy, {"joining": True}) for policy in PolicyName}
    cases |= {f"changing {row_count}": (row_count, PolicyName.UNCHUNKED, {"changing": True}) for row_count in rows}
    cases |= {f"{_CLOSE} {row_count}": (row_count, PolicyName.UNCHUNKED, {}) for row_count in rows}
    results: dict[str, object] = {}
    for name, (requests, policy, kind) in cases.items():
        lasts_s = measured_step_s(requests) if step_s is None else step_s
        plan = Plan(requests, steps, CLOSE_S if name.startswith(_CLOSE) else lasts_s)
        watch = asyncio.run(measure_steps(plan, policy, **kind))
        results[name] = figures = _figures(watch, plan)
        print(f"{name:26}", *(f"{key} {value:g}" for key, value in figures.items()), flush=True)
    return results


def measured_step_s(rows: int, folder: Path = RESULTS) -> float:
    """Return the newest saved step time of `rows` rows for an 8B model on a GPU in seconds, or else `STEP_S`."""
    for file in sorted(folder.glob("engine-llama-3-8b-*-bfloat16.json"), reverse=True):
        measured = json.loads(file.read_text(encoding="utf-8")).get(f"decode_ms_b{rows}")
        if measured is not None:
            return float(measured) / 1e3
    return STEP_S


def _figures(watch: Stopwatch, plan: Plan) -> dict[str, float]:
    # Counting may have begun in the middle of a step, whose earlier parts are then missing.
    counted = min(plan.steps, *(len(watch.spent[part]) for part in _OF_STEPS))
    spent = {part: np.array(times[:counted]) for part, times in watch.spent.items()}
    spent["results"] = np.sum([spent.pop(part) for part in _RESULTS], axis=0)
    whole = np.sum([spent[part] for part in PARTS], axis=0)
    cpu, clock = whole.T.tolist()
    figures = {f"{part}_us": round(statistics.median(spent[part][:, 0]), 1) for part in (*PARTS, "send")}
    middle, low = statistics.median(cpu), float(np.quantile(cpu, LOW))
    return figures | {
        "us": round(middle, 1),
        "us_low": round(low, 1),
        "us_p99": round(float(np.quantile(cpu, 0.99)), 1),
        "clock_us": round(statistics.median(clock), 1),
        "clock_us_low": round(float(np.quantile(clock, LOW)), 1),
        "step_ms": round(plan.step_s * 1e3, 3),
        "ratio": round(middle / 1e6 / plan.step_s, 5),
        "ratio_low": round(low / 1e6 / plan.step_s, 5),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=ROWS, help="that decode")
    parser.add_argument("--steps", type=at_least(1), default=300, help="that are counted in each case")
    parser.add_argument("--step-ms", type=above_0, help="the device's time for a step; default: that of a saved run")


def measure(options: argparse.Namespace) -> Measured:
    """Measure all cases for each number of rows."""
    step_s = None if options.step_ms is None else options.step_ms / 1e3
    cases = run(tuple(options.requests), options.steps, step_s)
    return "scheduling", run_facts("cpu") | {"dtype": "none", "steps": options.steps, "inside": INSIDE, "cases": cases}
