"""Cancels the work for a client that has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tandem.protocol.errors import Cancelled

_T = TypeVar("_T")


async def unless_gone(work: Coroutine[Any, Any, _T], gone: asyncio.Future[None]) -> _T:
    """Await `work` and return its result; if `gone` completes first, cancel `work` and raise `Cancelled`."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client left")
        return working.result()
    finally:
        working.cancel()
