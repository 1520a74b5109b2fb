"""Moves the clock of an event loop forward in tests."""

import asyncio


def jump(seconds: float) -> None:
    """Move the running event loop's clock forward, so that its timers fire `seconds` earlier."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
