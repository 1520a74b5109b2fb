"""The router's policies over workers that only let time pass: a discrete-event simulation for tests.

Prefill workers compute one prompt after the other, at the speed of their step cost (times `slowness`); decode workers
hold a request for a fixed time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.config import RouterConfig
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.placement.scheduler import RequestScheduler, record
from tandem.cost_model.step_work import chunk_pairs
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.slo import BEST_EFFORT, SloClass
from tests.unit.router.fleets import H200, TestFleet


@dataclass
class Request:
    """One request of the simulation and its outcome."""

    queued: QueuedRequest
    asked: SloClass
    refused: ResourceExhausted | None = None
    ttft_s: float = math.inf

    @property
    def met(self) -> bool:
        return self.ttft_s <= self.asked.ttft_s


@dataclass
class World:
    """A simulation of two prefill workers and two decode workers by default."""

    prefills: int = 2
    slowness: float = 1.0
    answer_s: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = TestFleet()
        for number in range(self.prefills):
            self.at.add(f"p{number}", Role.PREFILL, pages_total=100_000, max_step_tokens=2048)
        for number in range(2):
            self.at.add(f"d{number}", Role.DECODE, pages_total=100_000, max_batch_requests=1024)
        self.by_peer = {worker.peer: worker for worker in self.at.workers.values()}
        self.config = RouterConfig(
            "r", ModelSettings(Path(), ("m",)), "", **{"max_queued_requests": 100_000, **self.settings}
        )
        self.scheduler = RequestScheduler(
            self.config, PlacementPolicy(Mode.DISAGGREGATED), self.at.fleet, self.at.clock
        )
        self.requests: list[Request] = []
        self.longest_step_s = 0.0
        """The longest decode step in seconds, given the requests that were placed there."""
        self._free_at = dict.fromkeys(self.by_peer, 0.0)
        self._by_id: dict[str, Request] = {}

    def schedule(self, moment_s: float, event: Callable[[], None]) -> None:
        """Schedules an event, after which the queue's head is placed as far as it can be."""

        def run() -> None:
            event()
            self._pump()
            self.longest_step_s = max(self.longest_step_s, *(worker.step_s for worker in self.by_peer.values()))

        self.at.clock.at(moment_s, run)

    def arrive(self, at: float, tokens: int = 2048, slo: SloClass = BEST_EFFORT, **more: Any) -> Request:
        """Schedules the arrival of a request."""
        number = len(self.requests)
        queued = QueuedRequest(f"r{number}", number, at, tokens, 100, slo=slo, **more)
        request = Request(queued, slo)
        self.requests.append(request)
        self._by_id[queued.internal_id] = request
        self.schedule(at, lambda: self._enter(request))
        return request

    def run(self) -> None:
        """Runs the simulation until no event is left."""
        self.at.clock.run()

    def _enter(self, request: Request) -> None:
        try:
            self.scheduler.enter(request.queued)
        except ResourceExhausted as error:
            request.refused = error

    def _pump(self) -> None:
        while (queued := self.scheduler.head()) is not None:
            placement = self.scheduler.bind(queued)
            if placement is not None:
                self._place(self._by_id[queued.internal_id], placement)
            elif not self.scheduler.may_pass(queued):
                return

    def _place(self, request: Request, placement: Placement) -> None:
        assert placement.decode is not None
        prefill, decode, name = (
            self.by_peer[placement.prefill],
            self.by_peer[placement.decode],
            request.queued.internal_id,
        )
        record(request.queued, placement, prefill, decode)
        tokens = placement.computed_tokens
        compute_s = prefill.cost.prefill_seconds(tokens, chunk_pairs(tokens, 0), 2048)[0] * self.slowness
        done = self._free_at[placement.prefill] = max(self.at.clock.now, self._free_at[placement.prefill]) + compute_s

        def first_token() -> None:
            request.ttft_s = self.at.clock.now - request.queued.arrived_s
            prefill.remove_prompt(name)
            self.schedule(self.at.clock.now + self.answer_s, over)

        def over() -> None:
            decode.remove_answer(name)
            self.scheduler.ended(request.queued, 100)

        self.schedule(done, first_token)


PROMPT_S = 4e-3 + (2048 - 200) * H200.token_s + 2048 * 2049 / 2 * H200.pair_s
"""The prefill time of a prompt of 2048 tokens in seconds: 41 ms."""
