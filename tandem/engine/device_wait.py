"""Short waits for a device, for work that takes microseconds on an idle one."""

import time
from typing import Protocol

SPIN_S = 300e-6
"""The time of polling before blocking, in seconds: a thread that blocks on the device wakes up tens of µs late."""
LOOK_S = 10e-6
"""The pause between polls, in seconds, in which other threads run. Linux's default timer slack would extend it."""


class DeviceEvent(Protocol):
    """A recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Returns True if the event has happened."""

    def synchronize(self) -> None:
        """Blocks until the event has happened."""


def wait_for(event: DeviceEvent) -> None:
    """Returns soon after `event` has happened: polls for a while, then blocks."""
    until = time.monotonic() + SPIN_S
    while not event.query():
        if time.monotonic() >= until:
            event.synchronize()
            return
        time.sleep(LOOK_S)
