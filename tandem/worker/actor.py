"""The Ray actor around a worker process, with the methods that controllers call; requests never pass through it.

A worker that may outlive its controller is a detached actor: no other process owns it, any controller of its namespace
may call it, and it ends by itself after a given time without contact to a controller.
"""

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import replace

from kv_transfer.nixl_backend.processes import this_process
from tandem.logging.logs import LogConfig, begin_log
from tandem.net.heap import freeze_gc, keep_imports
from tandem.protocol.messages import PeerRef
from tandem.worker.config import WorkerConfig
from tandem.worker.reporting.description import WorkerDescription, served_of, tuning_of

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""The interval at which a worker that may outlive controllers checks for contact with one, in seconds."""
LAST_GRACE_S = 30.0
"""Seconds that a worker without controllers gives its requests before it ends; their routers are probably gone, too."""
CONTROLLER = "controller-"
"""The prefix of the names of controllers' actors."""


class WorkerActor:
    """The Ray actor that runs a worker; the worker listens on its node's address and ignores the host of `config`.

    Its methods are coroutines, so `run` can stay pending while others are called.
    """

    def __init__(
        self,
        config: WorkerConfig,
        incarnation: int,
        log: LogConfig,
    ) -> None:
        begin_log(log, config.worker_id, incarnation)
        from ray.util import get_node_ip_address

        # Imported here and not above: the controller imports this module too, and has no use for torch.
        with keep_imports():
            from tandem.worker.process import WorkerProcess

        self._config = config
        self._me = PeerRef(config.worker_id, incarnation)
        engine = replace(config.engine, device=given_device(config.engine.device))
        self._process = WorkerProcess(replace(config, host=get_node_ip_address(), engine=engine), incarnation, log)
        self._progress = ("starting", 0.0)
        self._over: asyncio.Task[None] | None = None
        self._called_at = time.monotonic()
        self._outlive_s = config.outlive_s
        self._alone = asyncio.ensure_future(self._end_alone()) if config.outlive_s else None

    async def pid(self) -> int:
        """Return the id of this process."""
        self._called()
        return os.getpid()

    async def identity(self) -> str:
        """Return the identity of this process, which a controller needs to kill it."""
        return this_process()

    async def works(self) -> None:
        """Wait until the worker's event loop has checked that the device makes progress (`WorkerProcess.works`)."""
        self._called()
        await self._process.works()

    async def start(self) -> str:
        """Start the process (`WorkerProcess.start`), and return host:port of its metrics."""
        self._called()
        await asyncio.to_thread(self._process.start, self._note)
        freeze_gc()
        return self._process.metrics_address

    async def progress(self) -> tuple[str, float]:
        """Return the stage of the start in words, and the fraction of it that is done."""
        self._called()
        return self._progress

    async def describe(self) -> WorkerDescription:
        """Return the identity and state of the worker, for a controller that did not start it."""
        process, config = self._process, self._config
        return WorkerDescription(self._me, process.assignment, process.serves, served_of(config), tuning_of(config))

    async def change_controller(self, controller_address: str, outlive_s: float) -> str:
        """Register with another controller, and return host:port of the metrics.

        After this call, the worker ends after `outlive_s` seconds without contact to a controller. Raises the errors of
        `WorkerProcess.change_controller`.
        """
        self._called()
        await asyncio.to_thread(self._process.change_controller, controller_address)
        self._outlive_s = outlive_s
        log.info("%s follows the controller at %s", self._me.worker_id, controller_address)
        return self._process.metrics_address

    async def run(self) -> None:
        """Wait until the worker was drained or stopped. Raises the errors of `WorkerProcess.wait`."""
        if self._over is None:
            # One thread, however many controllers call `run`.
            self._over = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        await asyncio.shield(self._over)

    async def stop(self) -> None:
        """Stop the process (`WorkerProcess.stop`)."""
        await asyncio.to_thread(self._process.stop)

    def _note(self, stage: str, fraction: float) -> None:
        self._progress = (stage, fraction)

    def _called(self) -> None:
        self._called_at = time.monotonic()

    async def _end_alone(self) -> None:
        """End the worker after `outlive_s` seconds without contact to a controller."""
        while (silent_s := min(time.monotonic() - self._called_at, self._process.silent_s)) < self._outlive_s:  # noqa: ASYNC110
            await asyncio.sleep(min(LOOK_S, self._outlive_s - silent_s))
        log.warning("%s has had no contact with a controller for %.0f s, and ends", self._me.worker_id, silent_s)
        try:
            if self._process.serves:
                await asyncio.to_thread(self._process.drain, LAST_GRACE_S)
            await asyncio.to_thread(self._process.stop)
        except Exception:
            log.exception("%s did not end in order", self._me.worker_id)
        await asyncio.to_thread(release_own_group)


def release_own_group() -> None:
    """Remove the placement group of this actor, which ends the actor.

    If no controller runs in this namespace, the namespace's placement groups that wait for a node or whose worker has
    died are removed first, because no controller can still use them.
    """
    import ray
    from ray.util.placement_group import (
        get_current_placement_group,
        get_placement_group,
        placement_group_table,
        remove_placement_group,
    )

    actors = ray.util.list_named_actors()
    if not any(name.startswith(CONTROLLER) for name in actors):
        for name in {group["name"] for group in placement_group_table().values()} - {""}:
            with contextlib.suppress(ValueError):  # it belongs to another namespace, or is gone
                place = get_placement_group(name)
                there = [actor for actor in actors if actor.rpartition("-")[0] == name]
                if there and placement_group_table(place).get("state") == "CREATED":
                    continue
                remove_placement_group(place)
                for actor in there:
                    ray.kill(ray.get_actor(actor))
    own_group = get_current_placement_group()
    if own_group is not None:
        remove_placement_group(own_group)


def given_device(asked: str) -> str:
    """Return `asked`; if it is `cuda`, return the GPU that Ray has assigned to this process, e.g. `cuda:0`.

    The number is the one by which CUDA in this process knows the GPU.
    """
    if asked != "cuda":
        return asked
    import ray

    return f"cuda:{visible_number(str(ray.get_gpu_ids()[0]), os.environ.get('CUDA_VISIBLE_DEVICES'))}"


def visible_number(gpu: str, visible: str | None) -> int:
    """Return the number by which CUDA in this process knows the GPU with Ray's id `gpu`.

    `visible` is the value of CUDA_VISIBLE_DEVICES; None = all GPUs are visible.
    """
    return int(gpu) if visible is None else [device.strip() for device in visible.split(",")].index(gpu)
