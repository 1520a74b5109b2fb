"""Waits for short work on a device: work that takes only microseconds if the device is idle."""

import time
from typing import Protocol

SPIN_S = 300e-6
"""The time in seconds for which a thread polls before it blocks.

A thread that blocks on the device wakes up tens of microseconds after the event.
"""
LOOK_S = 10e-6
"""The pause between polls in seconds, in which other threads can run. Linux's default timer slack would lengthen it."""


class DeviceEvent(Protocol):
    """The interface of a recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True if the device has reached the event."""

    def synchronize(self) -> None:
        """Block until the device has reached the event."""


def wait_for(event: DeviceEvent) -> None:
    """Wait for `event`: poll for up to `SPIN_S` seconds, then block."""
    until = time.monotonic() + SPIN_S
    while not event.query():
        if time.monotonic() >= until:
            event.synchronize()
            return
        time.sleep(LOOK_S)
