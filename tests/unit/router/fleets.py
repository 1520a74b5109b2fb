"""Fleets without processes, under a clock that tests move."""

from dataclasses import dataclass, field, replace
from typing import Any

from router.placement.fleet import Fleet
from router.placement.policy import Placement
from router.placement.queue import QueuedRequest
from router.placement.worker_state import AnswerWork, PromptWork, WorkerState
from tandem.capacity.simulation.clock import VirtualClock
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.cost_parameters import UNMEASURED, CostParameters
from tandem.protocol.messages import ModelFacts, PeerRef, Role, WorkerInfo, WorkerLoad
from tandem.settings.slo import BEST_EFFORT, SloClass

MODEL = ModelFacts("fake", 400, 2048, (2,), "float32")
H200 = CostParameters(
    base_s=4e-3, token_s=2e-5, pair_s=1e-11, row_s=1e-5, context_s=3e-8, free_tokens=200, observed=1000
)
"""The step cost of an 8B model on one H200, roughly: 41 ms for 2048 tokens, 4 ms for a decode step."""


@dataclass
class TestFleet:
    """Workers by name, their clock, and the fleet that placement uses."""

    __test__ = False
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1000.0))
    fleet: Fleet = field(default_factory=Fleet)
    workers: dict[str, WorkerState] = field(default_factory=dict)

    def add(self, name: str, role: Role, cost: CostParameters = H200, **facts: Any) -> WorkerState:
        """Adds a live worker: 64 pages of 16 tokens, steps of 512 tokens, batches of 4, or as in `facts`."""
        info = WorkerInfo(PeerRef(name, 1), role, "", MODEL, 64, 16, 4, 512, "cpu", "in-memory")
        worker = WorkerState(replace(info, **facts), self.clock)
        learn_cost(worker, StepCost(cost))
        self.fleet.join(worker)
        self.fleet.set_live(worker, live=True)
        self.workers[name] = worker
        return worker

    def remove(self, name: str) -> None:
        """Removes a worker from the fleet."""
        self.fleet.leave(self.workers.pop(name))

    def prompt(self, name: str, tokens: int) -> None:
        """Adds a waiting prompt of another request to a worker."""
        worker = self.workers[name]
        worker.add_prompt(f"prompt-{len(worker.request_ids)}", PromptWork(tokens))

    def answers(
        self,
        name: str,
        count: int,
        *,
        pages: int = 4,
        context: int = 64,
        slo: SloClass = BEST_EFFORT,
    ) -> None:
        """Adds `count` decoding requests to a worker."""
        worker = self.workers[name]
        for _ in range(count):
            worker.add_answer(f"answer-{len(worker.request_ids)}", AnswerWork(pages, context, slo))


def learn_cost(worker: WorkerState, cost: StepCost) -> None:
    """Sets the cost of a worker's steps without a load report."""
    worker.cost = cost
    worker.refresh()


def load(prefill_tokens: int = 0, decode_requests: int = 0, pages_used: int = 0) -> WorkerLoad:
    """Returns a load report."""
    return WorkerLoad(0, prefill_tokens, decode_requests, pages_used, 64, cost=UNMEASURED)


def names(placement: Placement | None) -> tuple[str, str] | None:
    """Returns the names of the chosen prefill and decode worker."""
    if placement is None:
        return None
    return placement.prefill.worker_id, placement.decode.worker_id if placement.decode else ""


def need(prompt: int = 100, answer: int = 60, **more: Any) -> QueuedRequest:
    """Returns a request of `prompt` and `answer` tokens with an expected answer of at most 256 tokens."""
    return QueuedRequest("need", 0, 0.0, prompt, answer, **{"mean_tokens": min(256.0, answer), **more})
