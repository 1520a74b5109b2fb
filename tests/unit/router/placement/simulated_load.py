"""Loads on a simulated cluster whose steps take as long as those of `H200`, and what became of each request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from router.config import RouterConfig
from router.placement.queue import QueuedRequest
from tandem.capacity.simulation.clock import VirtualLoop
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.prompt import VirtualPrompt, page_names
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.capacity.simulation.spec import Device, WorkerSpec
from tandem.engine.config import EngineConfig
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.slo import BEST_EFFORT, SloClass
from tandem.worker.config import WorkerConfig
from tests.unit.router.fleets import H200, MODEL

PROMPT_S = 4e-3 + (2048 - 200) * H200.token_s + 2048 * 2049 / 2 * H200.pair_s
"""The prefill time of a prompt of 2048 tokens in seconds: 41 ms."""
ANSWER_TOKENS = 200
"""The tokens of an answer, which takes about one second."""
_PAGE_TOKENS = 128
_NETWORK = Network(1e-4, 1e-4, 1e-4, 1e-4, 1e18)


@dataclass
class Request:
    """One request of the load and its outcome."""

    asked: LoadRequest
    queued: QueuedRequest | None = None
    outcome: Outcome | None = None

    @property
    def refused(self) -> ResourceExhausted | None:
        return None if self.outcome is None else self.outcome.refused

    @property
    def ttft_s(self) -> float:
        if self.outcome is None or self.outcome.error:
            return math.inf
        return self.outcome.firsts_s[0] - self.asked.due_s

    @property
    def met(self) -> bool:
        return self.ttft_s <= self.asked.slo.ttft_s

    @property
    def degraded(self) -> bool:
        return self.queued is not None and self.queued.slo is BEST_EFFORT


@dataclass
class Load:
    """A load on two prefill workers, whose steps take `slowness` times as long as they report, and two decode workers.

    Time begins at 1000 s.
    """

    slowness: float = 1.0
    reported: CostParameters = H200
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = {"max_queued_requests": 100_000, "mode": Mode.DISAGGREGATED, **self.settings}
        slow = {name: self.slowness * getattr(H200, name) for name in ("base_s", "token_s", "pair_s")}
        engine = EngineConfig.of(Path(), max_step_tokens=2048, max_batch_requests=1024)
        specs = [
            WorkerSpec(
                WorkerConfig(f"{role.value}-{number}", role, engine),
                Device(cost, self.reported, 5_000, _PAGE_TOKENS, 1),
                replace(MODEL, max_context=10**6),
            )
            for role, cost in ((Role.PREFILL, replace(H200, **slow)), (Role.DECODE, H200))
            for number in range(2)
        ]
        config = RouterConfig("router", ModelSettings(Path(), ("m",)), "", **settings)
        self.clock = VirtualLoop(1000.0)
        self.cluster = VirtualCluster(specs, config, _NETWORK, clock=self.clock)
        self.cluster.router.on_end = self._on_end
        self.requests: list[Request] = []

    def arrive(self, at: float, tokens: int = 2048, slo: SloClass = BEST_EFFORT, *, tenant: str = "") -> Request:
        """Schedules the arrival of a request."""
        key = len(self.requests)
        prompt = VirtualPrompt(key, tokens, page_names([(key, 0, tokens)], _PAGE_TOKENS))
        request = Request(LoadRequest(at, prompt, ANSWER_TOKENS, slo, tenant))
        self.requests.append(request)
        self.clock.at(at, lambda: self._arrive(request))
        return request

    def run(self) -> None:
        """Runs the simulation until no event is left."""
        self.clock.run()

    @property
    def longest_step_s(self) -> float:
        """The longest gap between two tokens of the decode worker, in seconds."""
        answers = [each.outcome for each in self.requests if each.outcome is not None and not each.outcome.error]
        return max(float(np.diff(outcome.token_s(0.0))[1:].max()) for outcome in answers)

    def _arrive(self, request: Request) -> None:
        self.cluster.router.arrive(request.asked)
        if request.outcome is None:
            *_, routed = self.cluster.router.requests
            request.queued = routed.queued

    def _on_end(self, outcome: Outcome) -> None:
        self.requests[outcome.asked.prompt.key].outcome = outcome
