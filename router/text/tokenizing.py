"""The threads in which requests are parsed and tokenized, shared fairly among tenants."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from router.refusal import Refusal, Refused
from tandem.protocol.errors import TandemError, Unavailable

_T = TypeVar("_T")
_JOB_BYTES_MIN = 4 << 10
"""Minimum size that a job counts as, in bytes, because every job has a fixed cost."""


@dataclass(slots=True, eq=False)
class _Job:
    size: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class TokenizerPool:
    """Runs jobs in threads, round robin over the tenants.

    A tenant's next job waits for at most one job of each other tenant. The total size of waiting jobs is limited. The
    owner (a `RequestValidator` or `FormatCompiler`) calls the pool on the event loop and must `close` it.
    """

    def __init__(
        self,
        threads: int,
        waiting_bytes_max: int,
        retry_after_s: float,
        waits: str = "prompts wait to be tokenized",
        threads_per_tenant: int | None = None,
    ) -> None:
        """`retry_after_s` is the retry hint of rejections; `waits` ends their message "more than N bytes of …".

        A tenant may run at most `threads_per_tenant` jobs at the same time; None = as many as there are threads.
        """
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="router-tokenizer")
        self._waits = waits
        self._idle = threads
        self._threads_per_tenant = threads_per_tenant or threads
        self._running: Counter[str] = Counter()
        """Number of running jobs of each tenant."""
        self._waiting_bytes_max = waiting_bytes_max
        self._retry_after_s = retry_after_s
        self._waiting: dict[str, deque[_Job]] = {}
        """Waiting jobs by tenant, in round-robin order; tenants without a job are absent."""
        self._bytes: Counter[str] = Counter()
        """Number of waiting bytes of each tenant."""

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, size: int, work: Callable[[], _T]) -> _T:
        """Run `work`, which processes `size` bytes of the tenant, in a thread; return its result or raise its error.

        Raises Refused if too many bytes wait already. If the caller is cancelled, a waiting job is removed, but a
        running job continues.
        """
        job = _Job(max(size, _JOB_BYTES_MIN), work, asyncio.get_running_loop().create_future())
        if not self._idle:
            self._free_capacity(tenant, job.size)
        self._waiting.setdefault(tenant, deque()).append(job)
        self._bytes[tenant] += job.size
        self._begin_next()
        try:
            result: _T = await job.done
        except asyncio.CancelledError:
            self._withdraw(tenant, job)
            if not job.done.cancelled():
                job.done.exception()  # retrieved, or asyncio logs it
            raise
        return result

    def close(self) -> None:
        """Start no further jobs, and fail the waiting jobs with Unavailable."""
        for jobs in self._waiting.values():
            for job in jobs:
                _refuse(job, Unavailable("the router is stopping; send the request again"))
        self._waiting.clear()
        self._bytes.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _free_capacity(self, tenant: str, size: int) -> None:
        """Make room for `size` more bytes by rejecting the newest jobs of the tenant with the most waiting bytes.

        Raises Refused if that tenant would be the caller's, counting the new bytes.
        """
        while self._bytes.total() + size > self._waiting_bytes_max:
            full = Refused(
                Refusal.QUEUE_FULL,
                f"more than {self._waiting_bytes_max} bytes of {self._waits}; try again later",
                retry_after_s=self._retry_after_s,
            )
            largest, most = self._bytes.most_common(1)[0] if self._bytes else (tenant, 0)
            if most <= self._bytes[tenant] + size:
                raise full
            newest = self._waiting[largest][-1]
            self._withdraw(largest, newest)
            _refuse(newest, full)

    def _withdraw(self, tenant: str, job: _Job) -> None:
        """Remove a job from the queue if it is still waiting."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self._left(tenant, job)

    def _left(self, tenant: str, job: _Job) -> None:
        self._bytes[tenant] -= job.size
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._bytes[tenant]

    def _begin_next(self) -> None:
        while self._idle:
            able = (candidate for candidate in self._waiting if self._running[candidate] < self._threads_per_tenant)
            if (tenant := next(able, None)) is None:
                return
            jobs = self._waiting[tenant]
            job = jobs.popleft()
            self._left(tenant, job)
            if jobs:  # the tenant's next job comes after one of each other tenant
                self._waiting[tenant] = self._waiting.pop(tenant)
            self._idle -= 1
            self._running[tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._ended, tenant, job))

    def _ended(self, tenant: str, job: _Job, running: asyncio.Future[Any]) -> None:
        self._idle += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if running.cancelled():
            _refuse(job, Unavailable("the router is stopping; send the request again"))
            return
        error = running.exception()
        if not job.done.done():  # otherwise the caller was cancelled
            if error is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(running.result())
        self._begin_next()


def _refuse(job: _Job, error: TandemError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
