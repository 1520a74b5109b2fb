"""The sizes of all processes of a cluster: memory, descriptors, threads, shared memory and live Python objects.

The objects are counted inside of each process, which a `sitecustomize` on its Python path reaches: a thread waits for a
file that orders a count, and writes its result beside it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_SITECUSTOMIZE = """
import collections, gc, json, os, pathlib, sys, threading, time

FOLDER = pathlib.Path(os.environ["TANDEM_TEST_COUNTS"])


def count():
    done = ""
    while True:
        time.sleep(0.2)
        try:
            order = (FOLDER / "order").read_text()
        except OSError:
            continue
        if order and order != done:
            done = order
            gc.collect()
            kinds = collections.Counter(f"{type(one).__module__}.{type(one).__name__}" for one in gc.get_objects())
            most = kinds.most_common(200)
            counted = {"blocks": sys.getallocatedblocks(), "objects": sum(kinds.values()), "kinds": most}
            new = FOLDER / f".{os.getpid()}"
            new.write_text(json.dumps(counted))
            new.rename(FOLDER / f"{os.getpid()}-{order}")


threading.Thread(target=count, daemon=True, name="test-counts").start()
"""
_COUNTED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """The size of one process.

    `memory` is its private memory in bytes, `blocks` the number of blocks that Python's allocator has handed out, and
    `objects` the number of objects that its garbage collector tracks, after a collection; `kinds` has the most frequent
    types of these.
    """

    memory: int
    fds: int
    threads: int
    blocks: int
    objects: int
    kinds: dict[str, int] = field(compare=False)


class Counts:
    """Orders counts in the Python processes that are started within `counted_processes`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def sizes(self, pids: dict[str, int]) -> dict[str, ProcessSize]:
        """Returns the size of each process by name. Raises AssertionError if a process does not count."""
        self._number += 1
        order = self._folder / ".order"
        order.write_text(str(self._number))
        order.rename(self._folder / "order")
        return {name: self._size(name, pid) for name, pid in pids.items()}

    def _size(self, name: str, pid: int) -> ProcessSize:
        file, deadline_s = self._folder / f"{pid}-{self._number}", time.monotonic() + _COUNTED_WITHIN_S
        while not file.exists():
            assert time.monotonic() < deadline_s, f"{name} did not count its objects"
            time.sleep(0.1)
        counted = json.loads(file.read_text())
        file.unlink()
        process = psutil.Process(pid)
        with process.oneshot():
            sizes = process.memory_full_info().uss, process.num_fds(), process.num_threads()
        return ProcessSize(*sizes, counted["blocks"], counted["objects"], dict(counted["kinds"]))


@contextmanager
def counted_processes(folder: Path) -> Iterator[Counts]:
    """Makes Python processes that are started meanwhile count their objects on order."""
    counts = folder / "counts"
    counts.mkdir()
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    os.environ["TANDEM_TEST_COUNTS"] = str(counts)
    try:
        yield Counts(counts)
    finally:
        del os.environ["TANDEM_TEST_COUNTS"]
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def shared_memory(pids: Iterable[int]) -> tuple[int, int]:
    """Returns the number of files in /dev/shm that the processes map, removed ones included, and their bytes."""
    mapped: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):  # the process has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                addresses, *_, file = line.split(maxsplit=5)
                if file.startswith("/dev/shm/"):
                    begin, end = (int(address, 16) for address in addresses.split("-"))
                    mapped[file] = mapped.get(file, 0) + end - begin
    return len(mapped), sum(mapped.values())


def grown_kinds(before: ProcessSize, after: ProcessSize, most: int = 8) -> dict[str, int]:
    """Returns by how many the most frequent types of objects have grown, the fastest growing first."""
    grown = Counter(after.kinds)
    grown.subtract({kind: before.kinds[kind] for kind in after.kinds if kind in before.kinds})
    return {kind: count for kind, count in grown.most_common(most) if count > 0}
