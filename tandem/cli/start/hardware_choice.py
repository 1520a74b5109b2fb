"""Defaults of `tandem up` for device, mode and number of workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.cli.start.worker_options import AUTO

if TYPE_CHECKING:
    from tandem.cli.start.worker_options import EngineOptions, RoleOptions


def choose_hardware(roles: RoleOptions, engine: EngineOptions, *, joined: bool) -> tuple[RoleOptions, EngineOptions]:
    """Returns the options without `auto`.

    The device is `cuda` where this host has a usable GPU, otherwise `cpu`. On GPUs every worker has a GPU of its own
    and does both prefill and decode, adaptive over two or more; on a CPU one worker prefills and one decodes.
    `--prefill`, `--decode` and `--workers` override this. `joined`: workers run on the nodes of another Ray cluster,
    whose GPUs are unknown here, so their number has to be given.
    """
    from tandem.engine.device import usable_gpus

    gpus = usable_gpus() if engine.device in {AUTO, "cuda"} else 0
    device = engine.device if engine.device != AUTO else "cuda" if gpus else "cpu"
    separate = roles.prefill is not None or roles.decode is not None
    mode = roles.mode
    if mode == AUTO:
        shared = roles.workers is not None or (device != "cpu" and not joined)
        mode = "disaggregated" if separate or not shared else "adaptive"
    workers = roles.workers
    if workers is None and device == "cuda" and not joined:
        workers = max(1, gpus)
    return replace(roles, mode=mode, workers=workers), replace(engine, device=device)
