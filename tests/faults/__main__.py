"""Faults of real processes under mixed load: `python -m tests.faults --minutes 10 --seed 1`.

Starts a cluster of prefill and decode workers on the CPU, and strikes one process after the other, in a random
order that the seed determines, until the time is over. The JSON in benchmarks/results has the tries and outcomes of
each fault. The exit code is 1 if an answer was wrong or had no end, or if pages or requests remain at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, run_facts, save_result
from tandem.cli.models.default_model import find_default_model
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.errors import TandemError
from tandem.settings.cluster import ClusterSettings
from tests.faults.mixed_load import MixedLoad, Outcome
from tests.running_cluster import RunningCluster

SUSPENDED_S = 2.0
START_WITHIN_S = SERVES_WITHIN_S = 600.0
LOOK_S = 0.2
PARTS = ("prefill", "decode", "router", "controller")
ACTS = {"kill": "SIGKILL", "suspend": f"SIGSTOP for {SUSPENDED_S:g} s"}


@dataclass(slots=True)
class FaultRecord:
    """All tries of one fault."""

    part: str
    act: str
    tries: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.tries += 1
        self.answers += outcome.counts
        self.recovery_s.append(round(outcome.recovery_s, 2))
        self.details += outcome.details

    def as_result(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "act": ACTS[self.act],
            "tries": self.tries,
            "answers": dict(self.answers),
            "recovery_s": self.recovery_s,
            "details": self.details,
        }


async def strike(cluster: Any, part: str, act: str, rng: random.Random) -> None:
    """Kills or suspends the process of a part; a suspended one continues afterwards."""
    pid = await asyncio.to_thread(pid_of, cluster, part, rng)
    os.kill(pid, signal.SIGKILL if act == "kill" else signal.SIGSTOP)
    if act == "suspend":
        await asyncio.sleep(SUSPENDED_S)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def pid_of(cluster: Any, part: str, rng: random.Random) -> int:
    """Returns the process id of the router, the controller, or a random worker of a role."""
    if part == "controller":
        return int(cluster.controller_pid())
    if part == "router":
        return int(cluster.router().pid)
    return int(rng.choice([worker.pid for worker in cluster.workers() if worker.name.startswith(part)]))


def serves(cluster: Any) -> bool:
    """Returns True if the router and all workers serve; False also while no controller answers."""
    try:
        return all(part.phase == "serving" for part in (cluster.router(), *cluster.workers()))
    except (TandemError, OSError):
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition, which may block, is true."""
    deadline_s = time.monotonic() + SERVES_WITHIN_S
    while True:
        if await asyncio.to_thread(condition):
            return
        assert time.monotonic() < deadline_s, "a part does not serve again"
        await asyncio.sleep(LOOK_S)


async def campaign(
    load: MixedLoad, minutes: float, seed: int, once: Callable[[str, str, random.Random], Awaitable[None]]
) -> list[FaultRecord]:
    """Strikes with `once` until the time is over; each fault is tried before any is tried again."""
    rng = random.Random(seed)
    records = [FaultRecord(part, act) for part in PARTS for act in ACTS]
    await load.start()
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s:
        for record in rng.sample(records, len(records)):
            if time.monotonic() >= end_s:
                break
            load.struck()
            await once(record.part, record.act, rng)
            record.add(await load.recovered())
            print(f"{record.part} {ACTS[record.act]}: {dict(load.outcome.counts)}", flush=True)
    await load.stop()
    return records


def failures(records: list[FaultRecord]) -> list[str]:
    """Returns the answers that no fault allows."""
    return [f"{one.part} {ACTS[one.act]}: {detail}" for one in records for detail in one.details]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, after the start of the cluster")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of requests and faults")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON of tries and outcomes")
    parser.add_argument("--workers", type=int, default=2, help="of each role")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as logs:
        settings = ClusterSettings.of(
            model=prepare_model(find_default_model()),
            prefill=options.workers,
            decode=options.workers,
            start_timeout_s=START_WITHIN_S,
            grpc_port=0,
            http_port=0,
            threads=1,
            dtype="float32",
            kv_checksum_rate=1.0,
            page_tokens=16,
            kv_cache_bytes=1 << 27,
            max_step_tokens=128,
        )
        cluster = RunningCluster(settings, Path(logs))
        try:
            url = f"http://{cluster.http_address.removeprefix('http://')}/v1"

            async def once(part: str, act: str, rng: random.Random) -> None:
                await strike(cluster, part, act, rng)
                await until(lambda: serves(cluster))

            load = MixedLoad(url, options.seed)
            records = asyncio.run(campaign(load, options.minutes, options.seed, once))
            cluster.assert_idle_and_sound()
        finally:
            cluster.stop()
    faults = [record.as_result() for record in records]
    result = {
        **run_facts("cpu"),
        "dtype": "float32",
        "seed": options.seed,
        "minutes": options.minutes,
        "clients": load.clients,
        "workers": options.workers,
        "faults": faults,
    }
    print(save_result("faults", result, options.out))
    wrong = failures(records)
    print("\n".join(wrong or ["no answer was wrong"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
