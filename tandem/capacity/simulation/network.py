"""Delays between processes: calls, events and KV pages take time, and nothing is lost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """Delays in seconds, and bandwidth in bytes per second."""

    ingress_s: float = 1e-3
    """The delay of a request from a client to the router's queue."""
    call_s: float = 5e-4
    """The delay of a call between two processes, in one direction."""
    event_s: float = 1e-3
    """The delay of a step's output from the end of the step to the worker's event loop, the router or the client."""
    transfer_s: float = 3e-4
    """Fixed time of a KV write, in addition to its bytes."""
    bytes_per_s: float = 3.6e11
    """Bandwidth between two workers."""
    chunks_per_s: float | None = 5000.0
    """Maximum chunks per second that the router sends (`RouterConfig.chunks_per_s`); None = every token at once."""
    chunk_delay_max_s: float = 0.025
    event_jitter_s: float = 3e-4
    """Mean extra delay of a token; exponentially distributed, like the gaps at two H200s' clients (decision 22)."""
