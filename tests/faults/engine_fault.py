"""Makes one step of a worker's engine fail or hang.

Workers are processes of their own, so this reaches them as a `sitecustomize` on their Python path: it wraps the CPU
stepper when that is imported, and checks a folder once per step.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SITECUSTOMIZE = """
import importlib.abc, importlib.util, os, pathlib, sys, time

ORDERS = pathlib.Path(os.environ["TANDEM_TEST_FAULTS"])


def broken(launch):
    def wrapped(self, batch):
        kind = "decode" if all(len(row.token_ids) == 1 for row in batch.rows) else "prefill"
        order = ORDERS / kind
        try:
            fault = order.read_text()
            order.unlink()
        except FileNotFoundError:
            return launch(self, batch)
        if fault == "hang":
            time.sleep(3600)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nCompile with a page of advice.")

    return wrapped


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "tandem.engine.host_stepper":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.HostStepper.launch = broken(module.HostStepper.launch)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


class EngineFaults:
    """Orders faults for the workers of a cluster that is started within `reach_workers`, and for their replacements."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders = folder / "orders"
        self._orders.mkdir()
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)

    def reach_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.setenv("TANDEM_TEST_FAULTS", str(self._orders))

    def order(self, kind: str, fault: str) -> None:
        """Makes the next `prefill` or `decode` step of any one worker `raise` or `hang`."""
        written = self._orders / ".new"
        written.write_text(fault)
        written.rename(self._orders / kind)

    def open_orders(self) -> list[str]:
        return [order.name for order in self._orders.iterdir()]
