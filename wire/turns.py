"""How the threads of a process that passes tokens on take turns."""

import sys

_SWITCH_INTERVAL_S = 0.5e-3
"""How long one thread may keep the interpreter from another: a token passes two on its way through a process, and
Python's own 5 ms is a whole step of a GPU.
"""


def take_short_turns() -> None:
    """Once at the beginning of a process of one's own."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
