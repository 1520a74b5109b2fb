"""What a process has made by the end of its start stays, and nobody looks for garbage among it."""

import gc


def settle_heap() -> None:
    """Once at the end of a start, in a process of one's own.

    Libraries and models are some 300,000 objects. To look through them all takes 0.1 to 0.3 seconds, in which no token
    moves, and Python does so again and again as requests come. Now it looks at what came since.
    """
    gc.collect()
    gc.freeze()
