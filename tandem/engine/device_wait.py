"""Short waits for a device, for work that takes microseconds if the device is idle."""

import time
from typing import Protocol

SPIN_S = 300e-6
"""The seconds of polling before blocking: a thread that blocks on the device wakes up tens of microseconds late."""
LOOK_S = 10e-6
"""The pause between polls in seconds, in which other threads run. Linux's default timer slack would extend it."""


class DeviceEvent(Protocol):
    """A recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True if the event has happened."""

    def synchronize(self) -> None:
        """Block until the event has happened."""


def wait_for(event: DeviceEvent) -> None:
    """Return soon after `event` has happened: poll for a while, then block."""
    until = time.monotonic() + SPIN_S
    while not event.query():
        if time.monotonic() >= until:
            event.synchronize()
            return
        time.sleep(LOOK_S)
