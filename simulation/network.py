"""What lies between the processes: calls, events and pages take their time, and nothing is lost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """Seconds, and bytes a second."""

    ingress_s: float = 1e-3
    """From a client to the queue."""
    call_s: float = 5e-4
    """A call between two processes, one way."""
    event_s: float = 1e-3
    """From the end of a step to whoever hears of it: the worker's event loop, the router, the client."""
    transfer_s: float = 3e-4
    """Of a write of pages, beside its bytes."""
    bytes_per_s: float = 3.6e11
    """Between two workers."""
    chunks_per_s: float | None = 5000.0
    """Most chunks a second that the router sends (`RouterConfig.chunks_per_s`); None = every token at once."""
    chunk_delay_max_s: float = 0.025
    event_jitter_s: float = 3e-4
    """What a token's way takes longer, on average: exponential, as gaps of two H200s' clients spread (0022)."""


class Wire:
    """A sender's way out: one write after the other."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free_at = 0.0

    def write(self, now: float, size: int) -> float:
        """When `size` bytes that are sent now will have landed."""
        begun = max(now, self._free_at)
        self._free_at = begun + size / self._network.bytes_per_s
        return self._free_at + self._network.transfer_s
