"""One worker for the integration tests: a real process, configured by one JSON line on stdin.

It prints one JSON line when it serves, and stops, leaving nothing running, when stdin closes.
"""

import ctypes
import gc
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tandem.cost_model import prefix_reload
from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Role
from tandem.worker.config import WorkerConfig
from tandem.worker.process import WorkerProcess


def damage_arrivals(process: WorkerProcess, transfers: int) -> None:
    """Flips a bit in the first page of each of the next `transfers` transfers, once all of it has arrived."""
    if not transfers:
        return
    worker, engine = process._worker, process._engine
    assert worker is not None
    assert engine is not None
    cache, sums, left = engine.cache, worker._checks._sums, [None] * transfers

    def damaging(pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
        if left:
            left.pop()
            last = cache.base_address + (pages[0] + 1) * cache.page_bytes - 1
            ctypes.c_uint8.from_address(last).value ^= 1
        return sums(pages, filled, groups)

    worker._checks._sums = damaging


def main() -> None:
    order = json.loads(sys.stdin.readline())
    engine = EngineConfig.of(Path(order.pop("model")), **order.pop("engine"))
    incarnation = order.pop("incarnation")
    damaged = order.pop("damaged_transfers", 0)
    # A tiny model computes faster than pages are pulled.
    prefix_reload.saved_seconds = lambda _cost, _context, tokens, *_: float(tokens)
    if "kv_disk_path" in order:
        order["kv_disk_path"] = Path(order["kv_disk_path"])
    config = WorkerConfig(order.pop("worker_id"), Role(order.pop("role")), engine).with_fields(**order)
    process = WorkerProcess(config, incarnation)
    info = process.start()
    damage_arrivals(process, damaged)
    print(json.dumps({"address": info.address, "transport": info.transport}), flush=True)
    sys.stdin.read()
    remaining = process.drain(0.0)
    process.stop()
    process.wait()
    del process
    gc.collect()  # gRPC's poller ends with the last of its objects
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:
        thread.join(timeout=60.0)
    threads = [thread.name for thread in others if thread.is_alive()]
    print(json.dumps({"remaining": remaining, "threads": threads}), flush=True)


if __name__ == "__main__":
    main()
