"""The router's heartbeat checks of a front process.

The kernel keeps assigning new connections to a process that hangs, where they get no response.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.net.heartbeat import Heartbeat

LOOK_S = 5.0
"""Interval of the checks, in seconds."""
SILENT_LOOKS = 6
"""Number of consecutive checks without a response, half a minute, after which the process counts as hung.

On a host with two cores a process may wait for a core for seconds, and a restart loses its clients' connections.
"""
STARTING_LOOKS = 12
"""The same before its first response, while it imports its modules, perhaps from a slow disk."""


class Pulse(Heartbeat):
    """The heartbeat checks of one front process; every frame from it counts as a response."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends a request for a heartbeat."""
        super().__init__(ask, LOOK_S, lambda begun: SILENT_LOOKS if begun else STARTING_LOOKS)
