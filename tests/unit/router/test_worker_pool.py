"""The pool follows the controller, whatever one message meets."""

from pathlib import Path

import pytest

from router.config import RouterConfig
from router.worker_link import WorkerLink
from router.worker_pool import WorkerPool
from tests.unit.router.fake_cluster import FakeController, FakeWorker, until
from wire.messages import Lease, Role, StepEvents


class Observer:
    """Hears of changes and forgets them; the first `trouble` calls raise."""

    def __init__(self, trouble: int = 0) -> None:
        self.trouble = trouble

    def on_step(self, link: WorkerLink, step: StepEvents) -> None: ...

    def on_lost(self, link: WorkerLink) -> None: ...

    def on_lease_lost(self, link: WorkerLink, lease: Lease) -> None: ...

    def on_mode(self, mode: str) -> None: ...

    def on_change(self) -> None:
        if self.trouble:
            self.trouble -= 1
            raise ValueError("a defect")


async def test_a_defect_while_following_ends_no_watch(caplog: pytest.LogCaptureFixture) -> None:
    controller = await FakeController().start()
    observer = Observer(trouble=1)
    pool = WorkerPool(RouterConfig("router-0", Path(), "fake", controller.address), observer)
    await until(lambda: observer.trouble == 0, "the first message")
    worker = await FakeWorker("both-0", Role.BOTH).start()
    await controller.set(worker)
    await until(lambda: pool.ready, "the worker that joined after the defect")
    assert "a defect" in caplog.text
    await pool.close()
    await worker.kill()
    await controller.stop()
