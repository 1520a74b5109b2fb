"""A simulated router's connection to a worker: calls that take network time, and the router's state of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router.placement.fleet import Fleet
from router.placement.worker_state import BACK_OFF_S, WorkerState
from router.requests.sweeper import SWEEP_S
from router.workers.prefix_feed import PrefixFeed
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.worker import VirtualWorker
from tandem.protocol.errors import TandemError
from tandem.protocol.messages import GrantedLease, PrefillTask, RequestRef, Reservation, StepOutput, WorkerInfo
from tandem.protocol.prefixes import PrefixList, PrefixRun


class VirtualLink:
    """The connection to one simulated worker, see `Worker`; no call is lost, and leases do not expire."""

    def __init__(
        self,
        worker: VirtualWorker,
        fleet: Fleet,
        clock: VirtualClock,
        network: Network,
        *,
        router_id: str,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when the worker may have capacity again."""
        self.worker = worker
        self._fleet, self._clock, self._network = fleet, clock, network
        self._router_id, self._on_change = router_id, on_change
        self.state = WorkerState(worker.info, clock)
        fleet.join(self.state)
        self._prefixes = PrefixFeed(fleet.prefixes, self.state.slot)
        self._prefixes.load(PrefixList(0, ()))
        self.state.report(worker.load())
        fleet.set_live(self.state, live=True)

    @property
    def info(self) -> WorkerInfo:
        """See `Worker`."""
        return self.state.info

    @property
    def name(self) -> str:
        """See `Worker`."""
        return f"worker {self.info.peer.worker_id}"

    def apply_registration(self) -> None:
        """Apply the worker's registration, which has changed."""
        self.state.update(self.worker.info)
        self._fleet.set_live(self.state, live=self.info.open is not None)

    def learn(self, step: StepOutput) -> None:
        """Apply the load report and the prefix cache updates of a step."""
        for changes in step.prefixes:
            self._prefixes.take(changes)
        self.state.report(step.load)
        if not step.load.decode_requests and not step.load.prefill_tokens:
            for rounds in (1, 2):
                self._clock.after(rounds * SWEEP_S, self.state.expire_report)

    async def reserve(self, reservation: Reservation) -> GrantedLease:
        """See `Worker`."""
        async with self._call():
            await self.worker.reload(reservation)
            return self.worker.reserve(reservation)

    async def prefill(self, task: PrefillTask) -> None:
        """See `Worker`."""
        async with self._call():
            await self.worker.reload(task)
            self.worker.prefill(task)

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Delay what the worker does, and its reply or error, by the network's time each."""
        await asyncio.sleep(self._network.call_s)
        try:
            yield
        except TandemError:
            await asyncio.sleep(self._network.call_s)
            raise
        await asyncio.sleep(self._network.call_s)

    def read_ahead(self, prompt: PrefixRun) -> None:
        """See `Worker`."""
        asyncio.get_running_loop().create_task(self._send_read_ahead(prompt))

    async def _send_read_ahead(self, prompt: PrefixRun) -> None:
        await asyncio.sleep(self._network.call_s)
        await self.worker.read_ahead(prompt)

    def abort(self, ref: RequestRef) -> None:
        """See `Worker`."""
        self._clock.after(self._network.call_s, lambda: self.worker.abort(self._router_id, [ref]))

    def back_off(self) -> None:
        """See `Worker`."""
        self.state.back_off()
        self._clock.after(BACK_OFF_S, self._on_change)

    def keep_lease(self, granted: GrantedLease) -> None:
        """Do nothing: leases do not expire."""

    def drop_lease(self, request_id: str) -> None:
        """Do nothing: leases do not expire."""
