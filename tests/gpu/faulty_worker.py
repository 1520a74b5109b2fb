"""A worker on a GPU, in a separate process, whose device fails in the first prefill step.

Prints what a router and the process's supervisor receive, as one JSON line.

    python -m tests.gpu.faulty_worker MODEL_FOLDER out-of-range|never-ends
"""

import asyncio
import json
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from tandem.engine.config import EngineConfig
from tandem.protocol.errors import Internal
from tandem.protocol.messages import PrefillTask, RequestEvent, RequestRef, Role, SamplingParams
from tandem.worker.config import WorkerConfig
from tandem.worker.process import WorkerProcess

STEP_DEADLINE_S = 5.0
SPIN_CYCLES = 400_000_000_000
"""A spin of minutes on any GPU."""


def out_of_range() -> None:
    """Triggers a device-side assertion, which is reported at the next synchronization."""
    table = torch.zeros(16, 4, device="cuda")
    torch.index_select(table, 0, torch.full((4,), 1 << 20, device="cuda"))


def never_ends() -> None:
    torch.cuda._sleep(SPIN_CYCLES)


FAULTS = {"out-of-range": out_of_range, "never-ends": never_ends}


def main() -> None:
    folder, fault = Path(sys.argv[1]), FAULTS[sys.argv[2]]
    engine = EngineConfig.of(
        folder, device="cuda", random_weights=True, page_tokens=16, kv_cache_bytes=1 << 26, max_batch_requests=64
    )
    process = WorkerProcess(WorkerConfig("w", Role.BOTH, engine, step_deadline_s=STEP_DEADLINE_S), 1)
    process.start()
    assert process._engine is not None
    break_steps(process._engine.stepper, fault)
    future = asyncio.run_coroutine_threadsafe(ask(process._worker), process._events)
    reply = {"ended": end_of(process), **describe(future)}
    print(json.dumps(reply), flush=True)
    # As its supervisor would: work on a lost device cannot be ended cleanly.
    os._exit(0)


def break_steps(stepper: Any, fault: Any) -> None:
    """Breaks every launch of a step, as a graph or kernel by kernel."""
    compute = stepper._compute

    def broken(*arguments: Any) -> Any:
        fault()
        return compute(*arguments)

    stepper._compute = broken


async def ask(worker: Any) -> RequestEvent:
    """Returns the last event of one request."""
    stream = worker.attach("r")
    worker.prefill(PrefillTask("r", RequestRef("q", 1), (3, 4, 5), SamplingParams(max_tokens=1), None))
    async for step in stream.messages():
        for event in step.each():
            if event.finish_reason is not None:
                return event
    raise AssertionError("the stream ended without an answer")


def end_of(process: WorkerProcess) -> str:
    try:
        process.wait()
    except Internal as error:
        return error.message
    return "well"


def describe(future: "Future[RequestEvent]") -> dict[str, str]:
    event = future.result(timeout=30)
    assert event.error is not None
    return {"code": event.error.code, "message": event.error.message}


if __name__ == "__main__":
    main()
