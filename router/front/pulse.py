"""Whether a front process does its work. The kernel gives one that hangs its share of new connections on and on, and
nobody answers these.
"""

from __future__ import annotations

from collections.abc import Callable

from wire.heartbeat import Heartbeat

LOOK_S = 5.0
"""How often it is asked."""
SILENT_LOOKS = 6
"""So many looks in a row without a word of it, half a minute, and it hangs. Where two cores do all the work of a
cluster, a process may wait for a core for seconds, and each restart costs its clients their connections."""
STARTING_LOOKS = 12
"""The same before its first word: it imports its modules meanwhile, perhaps from a slow disk."""


class Pulse(Heartbeat):
    """The router's heartbeat of one of them; whatever comes from it is an answer."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends the question."""
        super().__init__(ask, LOOK_S, lambda begun: SILENT_LOOKS if begun else STARTING_LOOKS)
