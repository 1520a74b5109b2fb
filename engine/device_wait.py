"""How to wait for work of a device that takes microseconds, if the device is not busy with something else."""

import time
from typing import Protocol

SPIN_S = 300e-6
"""For how long to look again and again: a thread that sleeps until the device rings wakes up tens of µs later."""
LOOK_S = 10e-6
"""Between two looks, in which others have the interpreter. Linux makes more of it unless the thread says otherwise."""


class DeviceEvent(Protocol):
    """A `torch.cuda.Event` that was recorded."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def wait_for(event: DeviceEvent) -> None:
    """Return soon after `event` has happened: looks for a while, then sleeps until the device rings."""
    until = time.monotonic() + SPIN_S
    while not event.query():
        if time.monotonic() >= until:
            event.synchronize()
            return
        time.sleep(LOOK_S)
