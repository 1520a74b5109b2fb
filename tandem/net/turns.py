"""The thread switch interval of processes that pass tokens on."""

import sys

_SWITCH_INTERVAL_S = 0.5e-3
"""Maximum time for which a thread may hold the GIL while another waits for it, in seconds.

A token passes through two threads of a process, and Python's default of 5 ms is as long as a step of a GPU.
"""


def set_switch_interval() -> None:
    """Set the switch interval; call it once at the start of a process."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
