"""Sets how often threads take turns in processes through which tokens pass: the GIL's switch interval."""

import sys

_SWITCH_INTERVAL_S = 0.5e-3
"""Maximum time in seconds for which a thread keeps the GIL while another thread waits for it.

A token passes through two threads of a process, and Python's default of 5 ms is as long as a step of a GPU.
"""


def set_switch_interval() -> None:
    """Set Python's thread switch interval; call it once when a process starts."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
