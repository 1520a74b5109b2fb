"""Tunes garbage collection: objects that exist when a process has started are excluded from it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_imports() -> Iterator[None]:
    """Pause garbage collection while the body imports modules, and exclude the imported objects from later collections.

    Otherwise Python collects repeatedly while modules are created, which takes a sixth of the time of importing
    PyTorch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


_NEW_OBJECTS = 10_000
"""Number of new objects that trigger a collection, instead of Python's 700.

A router of 256 streams has thousands of new objects in use at any time. With Python's number, the router collected some
900 times within 76,800 messages and found little. The collections took 5 to 8 % of its CPU time, in pauses of up to 27
ms; with this number they take 0.2 %, in pauses of up to 5 ms.
"""


def freeze_gc() -> None:
    """Collect garbage once and exclude all remaining objects from later collections.

    Call it when a process has finished its start. Libraries and models are about 300,000 objects. A full collection of
    them takes 0.1 to 0.3 seconds, in which no token is processed, and Python repeats it as requests arrive. After this
    call, Python collects only newer objects, and less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
