"""Fleets without processes, under a clock that tests move."""

from dataclasses import dataclass, field, replace
from typing import Any

from costs.step_cost import StepCost
from router.placement.fleet import Fleet
from router.placement.policy import Placement
from router.placement.queue import QueuedRequest
from router.placement.worker_state import AnswerWork, PromptWork, WorkerState
from router.slo import BEST_EFFORT, SloClass
from wire.cost_parameters import UNMEASURED, CostParameters
from wire.messages import ModelFacts, PeerRef, Role, WorkerInfo, WorkerLoad

MODEL = ModelFacts("fake", 400, 2048, (2,), "float32")
H200 = CostParameters(
    base_s=4e-3, token_s=2e-5, pair_s=1e-11, row_s=1e-5, context_s=3e-8, free_tokens=200, observed=1000
)
"""About an 8B model on one H200: 41 ms for 2048 tokens, 4 ms for a decode step."""


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class TestFleet:
    """Workers by name, their clock, and the fleet that placement looks at."""

    __test__ = False
    clock: Clock = field(default_factory=Clock)
    fleet: Fleet = field(default_factory=Fleet)
    workers: dict[str, WorkerState] = field(default_factory=dict)

    def add(self, name: str, role: Role, cost: CostParameters = H200, **facts: Any) -> WorkerState:
        """A live worker: 64 pages of 16 tokens, steps of 512 tokens, batches of 4, unless `facts` say otherwise."""
        info = WorkerInfo(PeerRef(name, 1), role, "", MODEL, 64, 16, 4, 512, "cpu", "in-memory")
        worker = WorkerState(replace(info, **facts), self.clock)
        worker.learn_cost(StepCost(cost))
        self.fleet.join(worker)
        self.fleet.set_live(worker, live=True)
        self.workers[name] = worker
        return worker

    def remove(self, name: str) -> None:
        """It is gone."""
        self.fleet.leave(self.workers.pop(name))

    def prompt(self, name: str, tokens: int) -> None:
        """Somebody's prompt waits there."""
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
        """So many answers are decoded there."""
        worker = self.workers[name]
        for _ in range(count):
            worker.add_answer(f"answer-{len(worker.request_ids)}", AnswerWork(pages, context, slo))


def load(prefill_tokens: int = 0, decode_requests: int = 0, pages_used: int = 0) -> WorkerLoad:
    """A load report."""
    return WorkerLoad(0, prefill_tokens, decode_requests, pages_used, 64, cost=UNMEASURED)


def names(placement: Placement | None) -> tuple[str, str] | None:
    """The chosen prefill and decode worker."""
    if placement is None:
        return None
    return placement.prefill.worker_id, placement.decode.worker_id if placement.decode else ""


def need(prompt: int = 100, answer: int = 60, **more: Any) -> QueuedRequest:
    """A request of so many tokens, whose answer is expected to have 256 of them at most."""
    return QueuedRequest("need", 0, 0.0, prompt, answer, **{"mean_tokens": min(256.0, answer), **more})
