"""Where requests are read and tokenized: a few threads, which tenants use in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from router.refusal import Refusal, Refused
from wire.errors import TandemError, Unavailable

_T = TypeVar("_T")
_JOB_BYTES_MIN = 4 << 10
"""What the smallest job counts as: a job costs something whatever its size."""


@dataclass(slots=True, eq=False)
class _Job:
    size: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class TokenizerPool:
    """Runs jobs in threads. Those that wait are bounded in bytes and taken from the tenants in turn, so that nobody
    waits for more than one job of each other tenant. Belongs to the event loop; close it to end its threads.
    """

    def __init__(self, threads: int, waiting_bytes_max: int, retry_after_s: float) -> None:
        """`retry_after_s` is the hint that comes with a refusal."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="router-tokenizer")
        self._idle = threads
        self._waiting_bytes_max = waiting_bytes_max
        self._retry_after_s = retry_after_s
        self._waiting: dict[str, deque[_Job]] = {}
        """By tenant, whose turn is next first; a tenant without a job is not in it."""
        self._bytes: Counter[str] = Counter()
        """Waiting bytes of each tenant."""

    @property
    def waiting(self) -> int:
        """Jobs that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, size: int, work: Callable[[], _T]) -> _T:
        """What `work`, on `size` bytes of this tenant's, returns or raises. Refused if too much waits
        already. Whoever is cancelled leaves the queue; work that has begun goes on.
        """
        job = _Job(max(size, _JOB_BYTES_MIN), work, asyncio.get_running_loop().create_future())
        if not self._idle:
            self._make_room(tenant, job.size)
        self._waiting.setdefault(tenant, deque()).append(job)
        self._bytes[tenant] += job.size
        self._begin_next()
        try:
            result: _T = await job.done
        except asyncio.CancelledError:
            self._withdraw(tenant, job)
            if not job.done.cancelled():
                job.done.exception()  # looked at, or asyncio logs it
            raise
        return result

    def close(self) -> None:
        """Begin nothing more; whoever waits gets Unavailable."""
        for jobs in self._waiting.values():
            for job in jobs:
                _refuse(job, Unavailable("the router is stopping; send the request again"))
        self._waiting.clear()
        self._bytes.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, tenant: str, size: int) -> None:
        """Where too much waits, the newest of the tenant that waits with most gives way to one that waits with less."""
        while self._bytes.total() + size > self._waiting_bytes_max:
            full = Refused(
                Refusal.QUEUE_FULL,
                f"more than {self._waiting_bytes_max} bytes of prompts wait to be tokenized; try again later",
                retry_after_s=self._retry_after_s,
            )
            largest, most = self._bytes.most_common(1)[0] if self._bytes else (tenant, 0)
            if most <= self._bytes[tenant] + size:
                raise full
            newest = self._waiting[largest][-1]
            self._withdraw(largest, newest)
            _refuse(newest, full)

    def _withdraw(self, tenant: str, job: _Job) -> None:
        """Nothing happens to a job that does not wait."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self._left(tenant, job)

    def _left(self, tenant: str, job: _Job) -> None:
        self._bytes[tenant] -= job.size
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._bytes[tenant]

    def _begin_next(self) -> None:
        while self._idle and self._waiting:
            tenant = next(iter(self._waiting))
            jobs = self._waiting[tenant]
            job = jobs.popleft()
            self._left(tenant, job)
            if jobs:  # its next turn comes behind the others'
                self._waiting[tenant] = self._waiting.pop(tenant)
            self._idle -= 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._idle += 1
        if running.cancelled():
            _refuse(job, Unavailable("the router is stopping; send the request again"))
            return
        error = running.exception()
        if not job.done.done():  # else whoever asked is gone
            if error is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(running.result())
        self._begin_next()


def _refuse(job: _Job, error: TandemError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
