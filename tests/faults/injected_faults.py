"""Faults inside the processes of a cluster: failing or hanging steps, stalled writes, flipped bytes, stepped clocks.

The processes of a cluster are not the test's, so this reaches them as a `sitecustomize` on their Python path: it wraps
methods of some modules when these are imported, and looks for orders in a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SITECUSTOMIZE = """
import importlib.abc, importlib.util, os, pathlib, sys, time

ORDERS = pathlib.Path(os.environ["TANDEM_TEST_FAULTS"])
LOOK_S = 0.1


def taken(name):
    order = ORDERS / name
    try:
        fault = order.read_text()
        order.unlink()
    except FileNotFoundError:
        return ""
    return fault


def broken(launch):
    def wrapped(self, batch):
        kind = "decode" if all(len(row.token_ids) == 1 for row in batch.rows) else "prefill"
        fault = taken(kind)
        if not fault:
            return launch(self, batch)
        if fault == "hang":
            time.sleep(3600)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nCompile with a page of advice.")

    return wrapped


def flipped(compare):
    def wrapped(self, pages, expected, *more):
        if expected and taken("flip"):
            words = self._sums._sums[0]._words[pages[expected[-1].page]]
            words.flat[0] ^= 1
        return compare(self, pages, expected, *more)

    return wrapped


def stalled(poll):
    until_s = 0.0

    def wrapped(self):
        nonlocal until_s
        if self._posted and (seconds := taken("stall")):
            until_s = time.monotonic() + float(seconds)
        if time.monotonic() >= until_s:
            poll(self)

    return wrapped


def stepped(now, unit):
    looked_s, step = 0.0, 0

    def wrapped():
        nonlocal looked_s, step
        if time.monotonic() > looked_s + LOOK_S:
            looked_s = time.monotonic()
            try:
                step = int((ORDERS / "clock").read_text()) * unit
            except (FileNotFoundError, ValueError):
                step = 0
        return now() + step

    return wrapped


time.time, time.time_ns = stepped(time.time, 1), stepped(time.time_ns, 10**9)
WRAPPED = {
    "tandem.engine.host_stepper": ("HostStepper", "launch", broken),
    "kv_transfer.checksums": ("PageChecks", "compare", flipped),
    "kv_transfer.nixl_backend.posted_transfers": ("PostedTransfers", "poll", stalled),
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in WRAPPED:
            return None
        owner, method, wrap = WRAPPED.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            cls = getattr(module, owner)
            setattr(cls, method, wrap(getattr(cls, method)))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


class InjectedFaults:
    """Orders faults for the processes of a cluster started within `reach_workers`, and for their replacements."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders = folder / "orders"
        self._orders.mkdir()
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which processes obey."""
        path = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), "TANDEM_TEST_FAULTS": str(self._orders)}

    def reach_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def order(self, kind: str, fault: str) -> None:
        """Makes the next step, write or check of any one process fail.

        The next `prefill` or `decode` step will `raise` or `hang`; the next page write will `stall` for a number of
        seconds, and a byte of the next pages that arrive will `flip`. `clock` lasts until it is cancelled: it is the
        number of seconds by which Python's wall clock is wrong in all processes.
        """
        written = self._orders / ".new"
        written.write_text(fault)
        written.rename(self._orders / kind)

    def cancel(self, kind: str) -> bool:
        """Takes an order back; returns False if it has been obeyed or does not last."""
        try:
            (self._orders / kind).unlink()
        except FileNotFoundError:
            return False
        return True

    def open_orders(self) -> list[str]:
        return [order.name for order in self._orders.iterdir()]
