"""The tokenizer's threads: round robin over tenants, a bounded queue, and no work for clients that left."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from router.text.tokenizing import TokenizerPool
from tandem.protocol.errors import InvalidArgument, ResourceExhausted, Unavailable
from tests.unit.router.fake_cluster import until

KIB = 1 << 10


class Work:
    """Jobs of one thread that record the order in which they ran; the first waits until it may continue."""

    def __init__(self) -> None:
        self.pool = TokenizerPool(1, 64 * KIB, 2.5)
        self.go = threading.Event()
        self.ran: list[str] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}

    def job(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.go.wait(60)
            self.ran.append(name)
            return name

        return run

    async def add(self, tenant: str, name: str, size: int = 16 * KIB) -> None:
        self.tasks[name] = asyncio.create_task(self.pool.run(tenant, size, self.job(name)))
        await asyncio.sleep(0)

    async def finish(self) -> None:
        self.go.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@pytest.fixture
async def work() -> AsyncIterator[Work]:
    made = Work()
    yield made
    await made.finish()
    made.pool.close()


async def test_tenants_take_turns(work: Work) -> None:
    """Regression: a tenant that sent much was served before all others."""
    for number in range(4):
        await work.add("many", f"many-{number}", 4 * KIB)
    await work.add("one", "one-0", 4 * KIB)
    await work.finish()
    assert work.ran == ["many-0", "many-1", "one-0", "many-2", "many-3"]


async def test_a_tenant_leaves_a_thread_to_the_others() -> None:
    pool, go = TokenizerPool(2, 64 * KIB, 2.5, threads_per_tenant=1), threading.Event()
    many = [asyncio.create_task(pool.run("many", KIB, lambda: go.wait(60))) for _ in range(4)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(pool.run("one", KIB, lambda: "ran"), 30) == "ran"
    assert not any(task.done() for task in many)
    go.set()
    assert await asyncio.gather(*many) == [True] * 4
    pool.close()


async def test_more_than_the_queue_holds_is_refused_with_a_hint(work: Work) -> None:
    for number in range(5):  # the first runs, the others fill the queue
        await work.add("many", f"{number}")
    with pytest.raises(ResourceExhausted, match="try again") as refusal:
        await work.pool.run("many", 1, work.job("late"))
    assert refusal.value.retry_after_s == 2.5
    assert work.pool.waiting == 4
    await work.finish()
    assert work.ran == ["0", "1", "2", "3", "4"]


async def test_the_tenant_with_most_jobs_yields_to_others(work: Work) -> None:
    for number in range(5):
        await work.add("many", f"{number}")
    await work.add("one", "other")
    with pytest.raises(ResourceExhausted):
        await work.tasks["4"]
    await work.finish()
    assert work.ran == ["0", "1", "other", "2", "3"]


async def test_work_for_a_client_that_left_is_not_done(work: Work) -> None:
    for number in range(3):
        await work.add("many", f"{number}")
    work.tasks["1"].cancel()
    await until(lambda: work.pool.waiting == 1, "it left the queue")
    await work.finish()
    assert work.ran == ["0", "2"]


async def test_errors_reach_the_caller_and_the_next_job_runs(work: Work) -> None:
    def fail() -> None:
        raise InvalidArgument("prompt", "is wrong")

    with pytest.raises(InvalidArgument):
        await work.pool.run("a", 1, fail)
    work.go.set()
    assert await work.pool.run("a", 1, work.job("next")) == "next"


async def test_closing_ends_waiting_jobs(work: Work) -> None:
    for number in range(3):
        await work.add("many", f"{number}")
    work.pool.close()
    with pytest.raises(Unavailable):
        await work.tasks["2"]
    work.go.set()
    assert await work.tasks["0"] == "0"
