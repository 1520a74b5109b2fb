"""The pool follows the controller, whatever error one message causes."""

import logging
from pathlib import Path

import pytest

from router.config import RouterConfig
from router.workers.worker_link import WorkerLink
from router.workers.worker_pool import WorkerPool
from tandem.logging.recurring import RecurringErrors
from tandem.protocol.messages import Lease, Role, StepOutput
from tandem.settings.model import ModelSettings
from tandem.settings.secrets import Secrets
from tests.unit.router.fake_cluster import FakeController, FakeWorker, until


class Observer:
    """An observer whose first `trouble` calls of `on_change` raise."""

    def __init__(self, trouble: int = 0) -> None:
        self.trouble = trouble

    def on_step(self, link: WorkerLink, step: StepOutput) -> None: ...

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
    pool = WorkerPool(RouterConfig("router-0", ModelSettings(Path(), ("fake",)), controller.address), observer)
    await until(lambda: observer.trouble == 0, "the first message")
    worker = await FakeWorker("both-0", Role.BOTH).start()
    await controller.set(worker)
    await until(lambda: pool.ready, "the worker that joined after the defect")
    assert "a defect" in caplog.text
    await pool.close()
    await worker.kill()
    await controller.stop()


@pytest.mark.parametrize("controllers", ["of-the-cluster", ""])
async def test_a_router_with_another_token_says_so_and_not_with_every_try(
    controllers: str, caplog: pytest.LogCaptureFixture
) -> None:
    controller = await FakeController(controllers).start()
    pool = WorkerPool(
        RouterConfig("router-0", ModelSettings(Path(), ("fake",)), controller.address, Secrets("of-another")),
        Observer(),
    )
    await until(lambda: len(_said(caplog)) >= 3, "three tries")
    assert "do not accept each other's certificates: they have different cluster tokens" in _said(caplog)[0].message
    assert "give both the same --token or --token-file" in _said(caplog)[0].message
    assert controller.address in _said(caplog)[0].message
    assert {record.levelno for record in _said(caplog)} == {logging.ERROR}
    written = RecurringErrors()
    assert len([record for record in _said(caplog) if written.take(record)]) == 1
    await pool.close()
    await controller.stop()


async def test_a_controller_that_is_gone_is_not_said_with_every_try_either(caplog: pytest.LogCaptureFixture) -> None:
    controller = await FakeController().start()
    await controller.stop()
    pool = WorkerPool(RouterConfig("router-0", ModelSettings(Path(), ("fake",)), controller.address), Observer())
    await until(lambda: len(_said(caplog)) >= 3, "three tries")
    assert all(
        record.message.startswith(f"watching the controller at {controller.address}") for record in _said(caplog)
    )
    written = RecurringErrors()
    assert len([record for record in _said(caplog) if written.take(record)]) < len(_said(caplog))
    await pool.close()


def _said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "router.workers.worker_pool"]
