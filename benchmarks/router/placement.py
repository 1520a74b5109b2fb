"""Measures the cost of choosing workers for a request: `python -m benchmarks.router placement`.

The prefix caches of a fleet hold a million pages. Requests arrive one after another; each is placed by predicted cost
and counted at its workers, while earlier requests end. The measured time is everything that the router does to place a
request, except for the tokenizer, the hashing of pages (done by threads) and the two calls to the workers. It is CPU
time, so that other load of the machine does not count.

Figures are µs per request, absolute and as a share of one decode step of an 8B model.
"""

import argparse
import gc
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass

from benchmarks.command_line import Measured, at_least
from benchmarks.results import run_facts
from router.placement.fleet import Fleet
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.worker_state import AnswerWork, PromptWork, WorkerState
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.protocol.ending import pages_for
from tandem.protocol.messages import ModelFacts, PeerRef, Role, WorkerInfo, WorkerLoad
from tandem.protocol.mode import Mode
from tandem.settings.slo import DEFAULT_CLASSES

PAGE_TOKENS = 16
PROMPT_TOKENS, ANSWER_TOKENS = 2000, 500
RUNNING = 12
"""Decoding requests on each decode worker while others are placed."""
COSTS = CostParameters(
    base_s=3.9e-3, token_s=1.8e-5, pair_s=1.1e-11, row_s=1e-5, context_s=3.3e-8, free_tokens=200, observed=1
)
"""Approximate step costs of an 8B model on one H200."""
MODEL = ModelFacts("model", 128_256, 131_072, (), "bfloat16")


@dataclass(frozen=True, slots=True)
class Plan:
    """The size and mode of the fleet, and the number of requests."""

    workers: int
    pages: int
    requests: int
    mode: Mode
    shared: float
    """Share of the requests whose prompt has a prefix in some worker's cache."""


def make_fleet(plan: Plan, dice: random.Random) -> tuple[Fleet, list[list[bytes]]]:
    """Return the fleet and the prompts in its prefix caches, as hashes of their pages."""
    fleet, pages_each = Fleet(), plan.pages // plan.workers
    roles = [Role.BOTH] * plan.workers if plan.mode is not Mode.DISAGGREGATED else [Role.PREFILL, Role.DECODE]
    held: list[list[bytes]] = []
    system = [dice.randbytes(16) for _ in range(8)]
    for number in range(plan.workers):
        peer = PeerRef(f"worker-{number}", 1)
        role = roles[number % len(roles)]
        info = WorkerInfo(peer, role, "", MODEL, 4 * pages_each, PAGE_TOKENS, 256, 2048, "cuda:0", "UCX")
        worker = WorkerState(info, time.monotonic)
        worker.report(WorkerLoad(0, 0, 0, 0, 0, cost=COSTS))
        fleet.join(worker)
        fleet.set_live(worker, live=True)
        fleet.prefixes.store(worker.slot, system)
        for _ in range(pages_each // 125):
            prompt = system + [dice.randbytes(16) for _ in range(117)]
            fleet.prefixes.store(worker.slot, prompt)
            held.append(prompt)
    return fleet, held


def make_requests(plan: Plan, held: list[list[bytes]], dice: random.Random) -> list[QueuedRequest]:
    """Return prompts of conversations: some continue a cached prompt, others share only its system prompt."""
    requests = []
    for _ in range(plan.requests):
        known = dice.choice(held) if dice.random() < plan.shared else held[0][:8]
        digests = known + [dice.randbytes(16) for _ in range(PROMPT_TOKENS // PAGE_TOKENS - len(known))]
        slo = dice.choice(DEFAULT_CLASSES)
        request = QueuedRequest("", 0, 0.0, PROMPT_TOKENS, ANSWER_TOKENS, digests=tuple(digests), slo=slo)
        request.mean_tokens = ANSWER_TOKENS
        requests.append(request)
    return requests


class Placer:
    """Places requests and ends the oldest ones, as a router does."""

    def __init__(self, plan: Plan, fleet: Fleet) -> None:
        self._fleet = fleet
        self._policy = PlacementPolicy(plan.mode)
        self._by_peer = {worker.peer: worker for worker in fleet.live}
        self._running: deque[tuple[str, Placement]] = deque()
        self._most = RUNNING * plan.workers

    def place(self, name: str, request: QueuedRequest) -> bool:
        """Place one request, and return True on success."""
        if len(self._running) >= self._most:
            self._end(*self._running.popleft())
        pair = self._policy.place(request, self._fleet, 0.0)
        if pair is None or pair.decode is None:
            return False
        prefill, decode = self._by_peer[pair.prefill], self._by_peer[pair.decode]
        prefill.add_prompt(name, PromptWork(pair.computed_tokens, pair.cached_tokens))
        pages = pages_for(request.kv_tokens, PAGE_TOKENS)
        decode.add_answer(name, AnswerWork(pages, request.prompt_tokens + ANSWER_TOKENS // 2, request.slo))
        self._running.append((name, pair))
        return True

    def computed(self) -> None:
        """Report all prompts placed so far as computed."""
        for name, pair in list(self._running)[-len(self._by_peer) :]:
            self._by_peer[pair.prefill].remove_prompt(name)

    def _end(self, name: str, pair: Placement) -> None:
        assert pair.decode is not None
        self._by_peer[pair.prefill].remove_prompt(name)
        self._by_peer[pair.decode].remove_answer(name)


def measure_mode(plan: Plan) -> dict[str, object]:
    """Measure the time of each request, and return its quantiles and the fleet's size."""
    dice = random.Random(1)
    fleet, held = make_fleet(plan, dice)
    requests = make_requests(plan, held, dice)
    placer = Placer(plan, fleet)
    gc.collect()
    gc.freeze()  # traversing requests and index, which stay alive, is not part of a placement
    seconds, placed = [], 0
    for number, need in enumerate(requests):
        started = time.thread_time()
        placed += placer.place(f"request-{number}", need)
        seconds.append(time.thread_time() - started)
        if number % (plan.workers // 2) == 0:
            placer.computed()
    step_s = StepCost(COSTS).decode_step_seconds(RUNNING, RUNNING * (PROMPT_TOKENS + ANSWER_TOKENS // 2))
    settled = sorted(seconds[len(seconds) // 10 :])
    median = statistics.median(settled)
    return {
        "mode": str(plan.mode),
        "workers": plan.workers,
        "indexed_pages": len(fleet.prefixes),
        "requests": len(settled),
        "placed": placed / len(requests),
        "placement_us": round(median * 1e6, 2),
        "placement_p99_us": round(settled[int(len(settled) * 0.99)] * 1e6, 2),
        "placement_mean_us": round(statistics.mean(settled) * 1e6, 2),
        "step_us": round(step_s * 1e6, 1),
        "placement_per_step": round(median / step_s, 5),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--workers", type=at_least(2), default=64)
    parser.add_argument("--pages", type=at_least(1), default=1_000_000, help="pages in the prefix index")
    parser.add_argument("--requests", type=at_least(100), default=20_000)
    parser.add_argument("--shared", type=float, default=0.5, help="part of the prompts that a worker holds most of")
    parser.add_argument("--mode", type=Mode, choices=list(Mode), help="default: each of them")


def measure(options: argparse.Namespace) -> Measured:
    """Measure each mode; the main figures are those of the slowest mode."""
    results = []
    for mode in [options.mode] if options.mode else list(Mode):
        results.append(measure_mode(Plan(options.workers, options.pages, options.requests, mode, options.shared)))
        print(", ".join(f"{name} {value}" for name, value in results[-1].items()))
    worst = max(results, key=lambda result: float(str(result["placement_us"])))
    return "placement", run_facts("cpu") | {"dtype": "none", "placements": results} | worst
