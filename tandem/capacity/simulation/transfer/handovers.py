"""The open hand-overs of a simulated worker."""

from collections.abc import Callable

from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import PrefillScheduler
from tandem.capacity.simulation.clock import VirtualClock
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.transfer.handover import PrefillEnd, VirtualHandover


class VirtualHandovers:
    """Begins hand-overs for the prefill half, and receives its calls in place of an event loop."""

    def __init__(self, here: PrefillEnd, clock: VirtualClock, network: Network) -> None:
        self._here, self._clock, self._network = here, clock, network
        self._open: dict[PrefillRequest, VirtualHandover] = {}
        self._called = False

    def begin(self, request: PrefillRequest, half: PrefillScheduler) -> VirtualHandover:
        """Begins the hand-over of a request that has just been queued."""
        handover = self._open[request] = VirtualHandover(request, half, self._here, self._clock, self._network)
        return handover

    def call_soon_threadsafe(self, call: Callable[..., object], *args: object) -> None:
        """Runs `call` at once, and notes that progress was made."""
        self._called = True
        call(*args)

    def look(self) -> None:
        """Lets all hand-overs continue if the engine has made progress for any of them."""
        if not self._called:
            return
        self._called = False
        for request, handover in list(self._open.items()):
            handover.look()
            if handover.over:
                self._open.pop(request, None)
