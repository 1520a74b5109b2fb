"""The Ray shell around a worker process: what the controller calls, and nothing of a request."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from wire.heap import settle_heap
from wire.logs import LogFormat, begin_log
from worker.config import WorkerConfig


class WorkerActor:
    """To be made an actor by the controller; listens on its node's address, whatever `config` says.

    Its methods are coroutines, so `run` can stay pending beside them.
    """

    def __init__(
        self,
        config: WorkerConfig,
        incarnation: int,
        log: Path | None = None,
        log_format: LogFormat = LogFormat.PRETTY,
    ) -> None:
        begin_log(log, log_format, config.worker_id, incarnation)
        from ray.util import get_node_ip_address

        # Here, not above: the controller imports this module too, and has no use for torch.
        from worker.process import WorkerProcess

        engine = replace(config.engine, device=given_device(config.engine.device))
        self._process = WorkerProcess(replace(config, host=get_node_ip_address(), engine=engine), incarnation)
        self._progress = ("starting", 0.0)

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    async def start(self) -> str:
        """See `WorkerProcess.start`; host:port of its metrics."""
        await asyncio.to_thread(self._process.start, self._note)
        settle_heap()
        return self._process.metrics_address

    async def progress(self) -> tuple[str, float]:
        """The stage of the start in words, and the fraction of it that is done."""
        return self._progress

    async def run(self) -> None:
        """Pending until the worker was drained or stops; Internal when it had to."""
        await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """See `WorkerProcess.stop`."""
        await asyncio.to_thread(self._process.stop)

    def _note(self, stage: str, fraction: float) -> None:
        self._progress = (stage, fraction)


def given_device(asked: str) -> str:
    """`asked`, or, where that is `cuda`, the one GPU that Ray gave this process, by the number CUDA knows it by."""
    if asked != "cuda":
        return asked
    import ray

    return f"cuda:{visible_number(str(ray.get_gpu_ids()[0]), os.environ.get('CUDA_VISIBLE_DEVICES'))}"


def visible_number(gpu: str, visible: str | None) -> int:
    """The number of `gpu`, as Ray names it, among the `visible` ones: all of them where that is None."""
    return int(gpu) if visible is None else [each.strip() for each in visible.split(",")].index(gpu)
