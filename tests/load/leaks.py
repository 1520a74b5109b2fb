"""A hundred thousand short requests, a third of them cancelled: `python -m tests.load.leaks --requests 100000`.

Measures all processes of a cluster on the CPU after each part of the requests, when it is idle: private memory,
descriptors, threads and live Python objects, and the files in shared memory. After the warm-up, in which pools and
caches fill, none of them may grow. The JSON in benchmarks/results has all measurements. The exit code is 1 if something
grew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import RESULTS, run_facts, save_result
from tests.load.processes import Counts, ProcessSize, counted_processes, grown_kinds, shared_memory
from tests.load.small_cluster import MODEL, small_cluster
from tests.load.storm import storm
from tests.running_cluster import RunningCluster

PARTS, WARM_PARTS = 12, 4
"""The parts of the requests after each of which the processes are measured, and those that belong to the warm-up."""
PROMPTS, PROMPT_TOKENS_MAX, SALTS = 48, 64, 8
"""Few enough that pools, caches and statistics of prompts are full after the warm-up."""
POOL_BYTES = 1 << 24
"""The KV pool of each worker, whose memory counts once it has been written to."""
MEMORY_GROWTH_MAX = 8 << 20
"""In bytes for a process; allocators keep freed memory, and the next part may need another order of it."""
OBJECTS_PER_REQUEST_MAX = 0.02
"""A leak of one object for every fifty requests is found."""
OBJECTS_GROWTH_MAX = 2000
"""Objects that may be alive by chance in one of two measurements: timers, buffers, and statistics that are not full."""
FDS_GROWTH_MAX, THREADS_GROWTH_MAX = 2, 6
"""Thread pools start threads when all others are busy, and never end them; connections are opened likewise."""


def named_pids(cluster: RunningCluster) -> dict[str, int]:
    """Returns the process ids of the controller, the router and the workers, by name."""
    parts = {worker.name: worker.pid for worker in cluster.workers()}
    return {"controller": cluster.controller_pid(), "router": cluster.router().pid, **parts}


def other_sizes(known: dict[str, int]) -> dict[str, ProcessSize]:
    """Returns the sizes of the other processes that this one has started: those of Ray, without counts of objects."""
    sizes: dict[str, ProcessSize] = {}
    for process in psutil.Process().children(recursive=True):
        if process.pid in known.values():
            continue
        try:
            memory, fds, threads = process.memory_full_info().uss, process.num_fds(), process.num_threads()
            sizes[f"{process.name()} {process.pid}"] = ProcessSize(memory, fds, threads, 0, 0, {})
        except psutil.Error:
            continue  # it has ended meanwhile
    return sizes


class Series:
    """The sizes of all processes after each part of the requests."""

    def __init__(self, cluster: RunningCluster, counts: Counts) -> None:
        self._cluster, self._counts = cluster, counts
        self.pids = named_pids(cluster)
        self.sizes: list[dict[str, ProcessSize]] = []
        self.shared: list[tuple[int, int]] = []

    def measure(self) -> None:
        """Measures all processes of the idle cluster."""
        self._cluster.assert_idle_and_sound()
        assert named_pids(self._cluster) == self.pids, "a process was restarted"
        gc.collect()  # of this process, whose channels and sockets are the other ends of the cluster's
        self.sizes.append(self._counts.sizes(self.pids) | other_sizes(self.pids))
        self.shared.append(shared_memory(one.pid for one in psutil.Process().children(recursive=True)))

    def growth(self, warm: int, requests: int) -> list[str]:
        """Returns what has grown since measurement number `warm`, after which `requests` were sent."""
        found = []
        first, last = lowest(self.sizes[warm : warm + 2]), lowest(self.sizes[-2:])
        objects_max = OBJECTS_GROWTH_MAX + OBJECTS_PER_REQUEST_MAX * requests
        limits = {"memory": MEMORY_GROWTH_MAX, "fds": FDS_GROWTH_MAX, "threads": THREADS_GROWTH_MAX}
        limits |= {"blocks": objects_max, "objects": objects_max}
        for name in first.keys() & last.keys():
            for what, limit in limits.items():
                grown = getattr(last[name], what) - getattr(first[name], what)
                if grown > limit:
                    kinds = grown_kinds(first[name], last[name]) if what in ("blocks", "objects") else ""
                    found.append(f"{name}: {what} grew by {grown} in {requests} requests; at most {limit:g} {kinds}")
        (files, size), (last_files, last_size) = self.shared[warm], self.shared[-1]
        if last_files > files or last_size > size + MEMORY_GROWTH_MAX:
            found.append(f"shared memory grew from {files} files of {size} bytes to {last_files} of {last_size}")
        return sorted(found)

    def as_result(self) -> dict[str, Any]:
        names = self.sizes[-1].keys() & self.sizes[0].keys()
        sizes = {
            name: [asdict(replace(one[name], kinds={})) for one in self.sizes if name in one] for name in sorted(names)
        }
        series = {
            name: {what: [one[what] for one in some] for what in some[0] if what != "kinds"}
            for name, some in sizes.items()
        }
        return {"processes": series, "shared_memory_files_and_bytes": self.shared}


def lowest(sizes: list[dict[str, ProcessSize]]) -> dict[str, ProcessSize]:
    """Returns for each process that is in all measurements the least of each size, with the kinds of the last one."""
    names = set.intersection(*(set(one) for one in sizes))
    whats = ("memory", "fds", "threads", "blocks", "objects")
    return {
        name: replace(sizes[-1][name], **{what: min(getattr(one[name], what) for one in sizes) for what in whats})
        for name in names
    }


def run(cluster: RunningCluster, counts: Counts, requests: int, seed: int) -> tuple[Series, Counter[str]]:
    """Sends the requests in parts, and measures the processes before the first and after each of them."""
    dice = random.Random(seed)
    vocabulary = int(MODEL["vocab_size"])
    prompts = [
        tuple(dice.randrange(3, vocabulary) for _ in range(dice.randint(1, PROMPT_TOKENS_MAX))) for _ in range(PROMPTS)
    ]
    series, outcomes, part = Series(cluster, counts), Counter[str](), requests // PARTS
    series.measure()
    for number in range(PARTS):
        began_s = time.monotonic()
        outcomes += Counter(asyncio.run(storm(cluster, prompts, part, seed + number, SALTS)))
        rate = part / (time.monotonic() - began_s)
        series.measure()
        memory = {name: f"{size.memory / 2**20:.1f}" for name, size in series.sizes[-1].items() if name in series.pids}
        print(f"{(number + 1) * part} requests, {rate:.0f} a second, MiB: {memory}", flush=True)
    return series, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.leaks")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and cancellations")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        counted_processes(Path(folder)) as counts,
        small_cluster(kv_cache_bytes=POOL_BYTES) as cluster,
    ):
        series, outcomes = run(cluster, counts, options.requests, options.seed)
    after = (PARTS - WARM_PARTS) * (options.requests // PARTS)
    found = series.growth(WARM_PARTS, after)
    facts = {**run_facts("cpu"), "dtype": "float32", "requests": options.requests, "seed": options.seed}
    result = {**facts, "outcomes": dict(outcomes), "warm_parts": WARM_PARTS, "grown": found, **series.as_result()}
    print(save_result("leaks", result, options.out))
    print("\n".join(found or ["nothing grew"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
