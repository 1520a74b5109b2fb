"""What is done for a client ends when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from wire.errors import Cancelled

_T = TypeVar("_T")


async def unless_gone(work: Coroutine[Any, Any, _T], gone: asyncio.Future[None]) -> _T:
    """What `work` returns or raises; it is cancelled, and `Cancelled` raised, when `gone` is done before it."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client left")
        return working.result()
    finally:
        working.cancel()
