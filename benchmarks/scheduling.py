"""What a step costs beside its computation: `python -m benchmarks.scheduling`.

A real worker, both halves, its loop, cache, leases and outbox, over an engine that computes nothing and lets every step
last as long as one of an 8B model on a large GPU. Counted is the CPU time of the loop's thread: to plan a step (who
is in it, with which rows), and from launch to launch, which is that, and to hand out the results of the step before and
to learn from its time. First all requests decode, then prompts join them, under each policy.

With asynchronous engines all of it happens while the device is at another step. The last line is one JSON object: µs a
step, and that as a part of the step.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import worker.worker
from benchmarks.results import run_facts, save_result
from costs.roofline import CPU, ModelSizes, Roofline
from engine.batch import PendingStep, StepBatch, StepResult
from engine.cache.page_checksums import page_checksums
from engine.cache.page_pool import PagePool
from engine.config import EngineConfig
from kv_transfer.in_memory import InMemoryFabric, InMemoryTransport
from kv_transfer.layout import KVLayout
from wire.cost_parameters import UNMEASURED
from wire.messages import Destination, ModelFacts, PeerRef, PrefillTask, RequestRef, Reservation, Role, SamplingParams
from wire.policy_name import PolicyName
from worker.config import WorkerConfig
from worker.loop import StepLoop
from worker.worker import Worker

PAGE_TOKENS = 128
STEP_TOKENS = 2048
PROMPT = 1000
JOINING_PROMPT = 1500
JOINING = 4
"""Prompts that wait at any time while prompts join."""
MODEL = ModelFacts("none", 128_256, 131_072, (2,), "bfloat16")
ME = PeerRef("both-0", 1)
ROUTER = "router"
_TOKEN = 5
_LOOK_S = 0.02
_HOURS = 1e4


@dataclass
class NoEngine:
    """Computes nothing: all answers are one token again and again. A step lasts `step_s` seconds."""

    pool: PagePool
    step_s: float = 0.0
    asynchronous: bool = True
    facts: ModelFacts = MODEL
    page_tokens: int = PAGE_TOKENS
    cost_guess = UNMEASURED
    roofline = Roofline(ModelSizes(0, 0, 0, 0), CPU)
    launches: list[tuple[int, int]] = field(default_factory=list)
    """Rows of each step, and the CPU time of the thread that launched it, in ns."""
    begun: list[int] = field(default_factory=list)
    """The same when each was begun to be planned."""

    def __post_init__(self) -> None:
        self.memory = np.zeros((self.pool.counts().total, self.page_tokens, 2), dtype="<i4")
        self.layout = KVLayout(self.memory.ctypes.data, len(self.memory), 1, 1, self.page_tokens, 1, 4, "int32")
        self.page_sums = page_checksums(torch.from_numpy(self.memory).view(-1, 1, 1, 1, self.page_tokens, 2))

    def compatibility_facts(self) -> tuple[tuple[str, str], ...]:
        return ()

    def launch(self, batch: StepBatch) -> PendingStep:
        self.launches.append((len(batch.rows), time.thread_time_ns()))
        due = time.monotonic() + self.step_s
        tokens = [None if row.draw is None else _TOKEN for row in batch.rows]

        def result() -> StepResult:
            time.sleep(max(0.0, due - time.monotonic()))
            return StepResult(tokens)

        return result


class TimedLoop(StepLoop):
    """Notes when it begins to plan a step."""

    def _launch(self) -> Any:
        engine = self._runner
        assert isinstance(engine, NoEngine)
        begun = time.thread_time_ns()
        step = super()._launch()
        if step is not None:
            engine.begun.append(begun)
        return step


@dataclass(frozen=True, slots=True)
class Times:
    """µs of each step."""

    plan: list[float]
    whole: list[float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    requests: int
    steps: int
    step_s: float


async def measure(plan: Plan, policy: PolicyName, *, joining: bool) -> Times:
    """Of `plan.steps` steps with all requests running, and prompts `joining` them or not."""
    answer = 4 * plan.steps + 400
    pages = plan.requests * (-(-(PROMPT + answer) // PAGE_TOKENS) + 1) + 2048
    engine, fabric = NoEngine(PagePool(pages)), InMemoryFabric()
    config = WorkerConfig(
        ME.worker_id,
        Role.BOTH,
        EngineConfig(Path("none"), max_step_tokens=STEP_TOKENS, max_batch_requests=plan.requests),
        lease_s=_HOURS,
        attach_grace_s=_HOURS,
        kv_checksum_rate=0.0,
        step_policy=policy,
        itl_target_s=2 * plan.step_s if joining else None,
    )
    with patch.object(worker.worker, "StepLoop", TimedLoop):
        tested = Worker(
            config, ME, engine, engine.layout, lambda notice: InMemoryTransport(fabric, engine.layout, ME, notice)
        )
    tested.start()
    try:
        await _decode_all(tested, plan, answer)
        engine.step_s = plan.step_s
        first = len(engine.launches) + 2
        joined = 0
        while len(engine.launches) < first + plan.steps + 1:
            while joining and tested.load().prefill_requests < JOINING:
                joined += 1
                _send(tested, f"p{joined}", JOINING_PROMPT, SamplingParams(max_tokens=1))
            await asyncio.sleep(_LOOK_S)
    finally:
        await tested.close()
        fabric.close()
    counted = slice(first, first + plan.steps + 1)
    launches = engine.launches[counted]
    if min(rows for rows, _ in launches) < plan.requests:
        raise RuntimeError("a request ended before the steps were counted")
    ends = [end for _, end in launches]
    return Times(
        [(end - begun) / 1e3 for begun, end in zip(engine.begun[counted], ends, strict=False)],
        [(later - earlier) / 1e3 for earlier, later in pairwise(ends)],
    )


async def _decode_all(tested: Worker, plan: Plan, answer: int) -> None:
    """Until all requests are in the batch."""
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    for number in range(plan.requests):
        _send(tested, f"d{number}", PROMPT, sampling)
    while tested.load().decode_requests < plan.requests:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


def _send(tested: Worker, name: str, tokens: int, sampling: SamplingParams) -> None:
    """A prompt that no other begins like; one that decodes is reserved for first."""
    ref, prompt = RequestRef(name, 1), (int.from_bytes(name.encode()) % MODEL.vocab_size, *range(100, 99 + tokens))
    destination = None
    if sampling.max_tokens > 1:
        lease = tested.reserve(Reservation(ROUTER, ref, prompt, sampling, ME)).lease
        destination = Destination(ME, "", lease)
    tested.prefill(PrefillTask(ROUTER, ref, prompt, sampling, destination))


def run(plan: Plan) -> dict[str, object]:
    """All cases, ready for JSON."""
    cases = {"decode": (PolicyName.UNCHUNKED, False)} | {f"mixed {each}": (each, True) for each in PolicyName}
    found: dict[str, object] = {}
    for name, (policy, joining) in cases.items():
        times = asyncio.run(measure(plan, policy, joining=joining))
        found[name] = figures = _figures("plan_", times.plan, plan) | _figures("", times.whole, plan)
        print(f"{name:22}", *(f"{key} {value:g}" for key, value in figures.items()), flush=True)
    return found


def _figures(name: str, times: list[float], plan: Plan) -> dict[str, float]:
    middle = statistics.median(times)
    return {
        f"{name}us": round(middle, 1),
        f"{name}us_p99": round(statistics.quantiles(times, n=100)[98], 1),
        f"{name}ratio": round(middle / 1e6 / plan.step_s, 4),
    }


def main() -> None:
    """Measure, print, and keep if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=256, help="that decode")
    parser.add_argument("--steps", type=int, default=300, help="that are counted in each case")
    parser.add_argument("--step-ms", type=float, default=9.3, help="how long the device is at a step")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    chosen = parser.parse_args()
    plan = Plan(chosen.requests, chosen.steps, chosen.step_ms / 1e3)
    result = run_facts("cpu") | {
        "dtype": "none",
        "requests": plan.requests,
        "steps": plan.steps,
        "step_ms": chosen.step_ms,
        "cases": run(plan),
    }
    if chosen.save:
        print(f"saved {save_result('scheduling', result)}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
