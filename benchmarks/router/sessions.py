"""Compares how sessions are placed on workers: `python -m benchmarks.router sessions`.

Sessions take turns on simulated workers that do both phases, with the product's router, schedulers and caches. The
sessions of a group share a system prompt; each turn repeats the session so far. Sessions are closed loops: the next
turn comes some seconds after the answer. Placements:

    cost           the product's: the lowest predicted cost to all requests
    exact          the worker with the longest cached prefix by its own reports; among equals the least loaded one
    exact scores   a weighted sum of prefix, queue and free KV, with weights 3, 2, 2, as llm-d's router scores them
    fuzzy scores   the same, with the prefixes that the router itself has placed, not those that workers report
    least loaded   without prefixes

`--groups 1` gives all sessions one system prompt.
"""

import argparse
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import mean, quantiles
from typing import Any

from benchmarks.command_line import Measured, above_0, at_least
from benchmarks.results import run_facts
from router.placement.fleet import Fleet
from router.placement.latency_model import AnswerPrediction, PromptPrediction
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.worker_state import WorkerState
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.prompt import Segment, VirtualPrompt, page_names
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.capacity.simulation.strategy import Strategy
from tandem.protocol.mode import Mode
from tandem.settings.slo import BEST_EFFORT

SHAPE = "llama-3-8b"
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 4000, 300, 150
"""Tokens of a system prompt, and median tokens of a question and of its answer."""


class ScoredPolicy(PlacementPolicy):
    """Places a request on the worker with the highest score, whatever waits there; each worker does both phases."""

    def __init__(self, *, prefix: float, load: float, fuzzy: bool = False) -> None:
        """Set the weights of the cached share of the prompt, and of a short queue and of free KV."""
        super().__init__(Mode.COLOCATED)
        self._prefix, self._load, self._fuzzy = prefix, load, fuzzy
        self._placed: dict[int, OrderedDict[bytes, None]] = {}
        """The digests of the prompts that were placed on each worker, by slot, least recently used first."""

    def place(self, request: QueuedRequest, fleet: Fleet, waited_s: float) -> Placement | None:
        """Return the placement on the worker with the highest score."""
        workers = [w for w in fleet.live if w.kv.held(request.reserved_tokens, decoding=True) <= w.pages_free]
        if not workers:
            return None
        pages = {worker.slot: self._pages(request.digests, worker, fleet) for worker in workers}
        queues = [worker.prefill_tokens + worker.decode_requests for worker in workers]
        low, span = min(queues), max(queues) - min(queues) or 1

        def score(worker: WorkerState) -> tuple[float, float]:
            queue = 1.0 - (worker.prefill_tokens + worker.decode_requests - low) / span
            free = max(0, worker.pages_free) / worker.info.pages_total
            cached = pages[worker.slot] / max(1, len(request.digests))
            return self._prefix * cached + self._load * (queue + free), queue + free

        worker = max(workers, key=score)
        held = self._placed.setdefault(worker.slot, OrderedDict())
        for digest in request.digests:
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > worker.info.pages_total:
            held.popitem(last=False)
        known = fleet.prefixes.match(request.digests).pages(worker.slot) * worker.kv.page_tokens
        prompt = PromptPrediction(worker, request.prefill_tokens, known)
        answer = AnswerPrediction(worker, known, request)
        cost_s = prompt.cost_s + answer.cost_s
        return Placement(worker.peer, worker.peer, prompt.ttft_s, answer.step_s, prompt.cached, prompt.computed, cost_s)

    def _pages(self, digests: Sequence[bytes], worker: WorkerState, fleet: Fleet) -> int:
        if not self._fuzzy:
            return fleet.prefixes.match(digests).pages(worker.slot)
        placed = self._placed.get(worker.slot, OrderedDict[bytes, None]())
        return next((number for number, digest in enumerate(digests) if digest not in placed), len(digests))


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "cost": lambda: PlacementPolicy(Mode.COLOCATED),
    "exact": lambda: ScoredPolicy(prefix=1000.0, load=1.0),
    "exact scores": lambda: ScoredPolicy(prefix=3.0, load=2.0),
    "fuzzy scores": lambda: ScoredPolicy(prefix=3.0, load=2.0, fuzzy=True),
    "least loaded": lambda: ScoredPolicy(prefix=0.0, load=1.0),
}


@dataclass(slots=True)
class Session:
    """A session: the key of its tokens, its group, and the tokens so far after the system prompt."""

    key: int
    group: int
    tokens: int = 0

    def prompt(self, page_tokens: int, question: int) -> VirtualPrompt:
        """Return the prompt of the next turn."""
        self.tokens += question
        segments: list[Segment] = [(-1 - self.group, 0, SYSTEM_TOKENS), (self.key, 0, self.tokens)]
        return VirtualPrompt(self.key, SYSTEM_TOKENS + self.tokens, page_names(segments, page_tokens))


def simulate(name: str, machine: Hardware, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a policy; the sessions are the same for all."""
    dice, keys = random.Random(options.seed), count(1)
    strategy = Strategy(name, Mode.COLOCATED, shared=options.workers)
    made = strategy.cluster(machine, Network(), BEST_EFFORT)
    cluster = VirtualCluster(made.specs, made.config, made.network, policy=POLICIES[name]())
    outcomes: list[Outcome] = []
    sessions: dict[int, Session] = {}

    def begin(at_s: float) -> None:
        session = Session(next(keys), dice.randrange(options.groups))
        sessions[session.key] = session
        cluster.clock.at(at_s, lambda: ask(session))

    def ask(session: Session) -> None:
        draw = random.Random(session.key * 1000 + session.tokens)
        prompt = session.prompt(machine.page_tokens, int(QUESTION_TOKENS * draw.lognormvariate(0, 0.5)) + 1)
        answer = int(ANSWER_TOKENS * draw.lognormvariate(0, 0.5)) + 2
        cluster.router.arrive(LoadRequest(cluster.clock.now, prompt, answer, BEST_EFFORT))

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        session = sessions[outcome.asked.prompt.key]
        session.tokens += outcome.asked.new_tokens
        draw = random.Random(session.key * 1000 + session.tokens)
        pause_s = options.pause_s * draw.lognormvariate(0, 1.0)
        if draw.random() < 1 / options.turns:
            del sessions[session.key]
            begin(cluster.clock.now + pause_s)
        else:
            cluster.clock.at(cluster.clock.now + pause_s, lambda: ask(session))

    cluster.router.on_end = ended
    for _ in range(options.sessions):
        begin(dice.uniform(0, 2 * options.pause_s))
    cluster.clock.run(options.seconds)
    return figures(outcomes, options)


def figures(outcomes: Sequence[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the requests that arrived in the second half of the time."""
    counted = [outcome for outcome in outcomes if outcome.asked.due_s > options.seconds / 2 and not outcome.error]
    prompts = sum(len(outcome.asked.prompt) for outcome in counted)
    by_worker = dict.fromkeys(range(options.workers), 0)
    for outcome in counted:
        by_worker[int(outcome.decode_worker.rpartition("-")[2])] += 1
    return {
        "turns_s": len(counted) / (options.seconds / 2),
        "ttft_ms": _percentiles(outcome.firsts_s[0] - outcome.asked.due_s for outcome in counted),
        "turn_ms": _percentiles(outcome.ended_s - outcome.asked.due_s for outcome in counted),
        "cached_share": sum(outcome.cached_tokens for outcome in counted) / max(1, prompts),
        "busiest_over_mean": max(by_worker.values()) / mean(by_worker.values()),
        "failed": sum(bool(outcome.error) for outcome in outcomes),
    }


def _percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile in milliseconds."""
    cuts = quantiles([1e3 * value for value in seconds], n=100)
    return {"50": cuts[49], "90": cuts[89], "99": cuts[98]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--workers", type=at_least(1), default=8)
    parser.add_argument("--sessions", type=at_least(1), default=400, help="concurrent sessions")
    parser.add_argument("--groups", type=at_least(1), default=4, help="system prompts")
    parser.add_argument("--turns", type=above_0, default=8.0, help="mean turns of a session")
    parser.add_argument(
        "--pause-s", type=above_0, default=8.0, help="median seconds between an answer and the next turn"
    )
    parser.add_argument("--kv-gib", type=above_0, default=20.0, help="memory of the KV pages of a worker")
    parser.add_argument("--seconds", type=above_0, default=240.0, help="simulated time; its second half counts")
    parser.add_argument("--seed", type=int, default=1)


def measure(options: argparse.Namespace) -> Measured:
    """Return the figures of each placement."""
    machine = hardware(SHAPE, None, options.kv_gib, 1.0)
    rows = {name: simulate(name, machine, options) for name in POLICIES}
    names = ("workers", "sessions", "groups", "turns", "pause_s", "kv_gib", "seconds", "seed")
    load = {name: getattr(options, name) for name in names}
    return "sessions", run_facts("cpu") | {"dtype": "none", "model": SHAPE, "load": load, "placements": rows}
