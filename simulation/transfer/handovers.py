"""The hand-overs under way at a simulated worker."""

from collections.abc import Callable

from prefill_worker.half import PrefillHalf
from prefill_worker.request import PrefillRequest
from simulation.clock import VirtualClock
from simulation.network import Network
from simulation.transfer.handover import PrefillEnd, VirtualHandover


class VirtualHandovers:
    """Begun by the prefill half, whose news they hear in place of an event loop: at once, to be looked at soon."""

    def __init__(self, here: PrefillEnd, clock: VirtualClock, network: Network) -> None:
        self._here, self._clock, self._network = here, clock, network
        self._open: dict[PrefillRequest, VirtualHandover] = {}
        self._called = False

    def begin(self, request: PrefillRequest, half: PrefillHalf) -> VirtualHandover:
        """Of a request that has just been queued."""
        handover = self._open[request] = VirtualHandover(request, half, self._here, self._clock, self._network)
        return handover

    def call_soon_threadsafe(self, call: Callable[..., object], *args: object) -> None:
        self._called = True
        call(*args)

    def look(self) -> None:
        """If the engine has done something for any of them."""
        if not self._called:
            return
        self._called = False
        for request, handover in list(self._open.items()):
            handover.look()
            if handover.over:
                self._open.pop(request, None)
