"""Simulates a load on a cluster of simulated workers and one simulated router."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from router.config import RouterConfig
from router.placement.policy import PlacementPolicy
from tandem.capacity.simulation.clock import VirtualLoop
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.request import LoadRequest, Outcome
from tandem.capacity.simulation.router import VirtualRouter
from tandem.capacity.simulation.spec import WorkerSpec
from tandem.capacity.simulation.transfer import VirtualFabric
from tandem.capacity.simulation.worker import VirtualWorker
from tandem.protocol.messages import PeerRef


@dataclass(slots=True)
class VirtualCluster:
    """A simulated cluster that runs one load; the next load needs a new cluster."""

    specs: Sequence[WorkerSpec]
    config: RouterConfig
    network: Network = field(default_factory=Network)
    jumps: bool = True
    """True to simulate runs of equal decode steps in a single operation, which is faster and has the same outcome."""
    policy: PlacementPolicy | None = None
    """Chooses the workers; None = the product's policy in the configured mode."""
    clock: VirtualLoop = field(default_factory=VirtualLoop)
    workers: dict[PeerRef, VirtualWorker] = field(default_factory=dict)
    router: VirtualRouter = field(init=False)
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes of ended requests, in the order in which the requests ended."""

    def __post_init__(self) -> None:
        self.router = VirtualRouter(self.config, self.clock, self.network, self.outcomes.append, self.policy)
        fabric = VirtualFabric(self.clock, self.network, self.workers)
        for spec in self.specs:
            worker = VirtualWorker(spec, self.clock, fabric, self.workers, self.router.on_step_output, jumps=self.jumps)
            self.workers[worker.peer] = worker
            self.router.join(worker)
            worker.assignment.on_change = partial(self._notify_router, worker)

    def _notify_router(self, worker: VirtualWorker) -> None:
        """Notify the router of a worker's new assignment after two network delays, as if through the controller."""
        self.clock.after(2 * self.network.call_s, lambda: self.router.apply_assignment(worker))

    def run(self, requests: Iterable[LoadRequest], until_s: float = float("inf")) -> list[Outcome]:
        """Run the requests, sorted by `due_s`, until all have ended or the time is `until_s`; return their outcomes."""
        coming = iter(requests)

        def next_one() -> None:
            request = next(coming, None)
            if request is not None:
                self.clock.at(request.due_s + self.network.ingress_s, lambda: arrive(request))

        def arrive(request: LoadRequest) -> None:
            next_one()
            self.router.arrive(request)

        next_one()
        self.clock.run(until_s)
        return self.outcomes
