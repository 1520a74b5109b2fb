"""A worker's figures for its diagnosis, read from two scrapes of the cluster."""

from telemetry import families as f
from telemetry.scrape import Stretch
from telemetry.walls import Figures

_ROUTER = "router"


def figures_of(stretch: Stretch, worker: str) -> Figures:
    """Of `worker` in this stretch; zeros where it has told nothing."""
    now, me = stretch.now, {"worker": worker}
    busy_s = stretch.grown(f.STEP_BUSY, **me)
    return Figures(
        busy=_part(busy_s, stretch.seconds),
        compute=_part(stretch.grown(f.STEP_FLOPS, **me), busy_s * now.total(f.DEVICE_FLOPS, **me)),
        bandwidth=_part(stretch.grown(f.STEP_BYTES, **me), busy_s * now.total(f.DEVICE_BANDWIDTH, **me)),
        kv_used=now.total(f.KV_USAGE, **me),
        preempted=stretch.grown(f.PREEMPTIONS, **me),
        decoding=stretch.mean(f.STEP_DECODE_ROWS, **me) or 0.0,
        batch_limit=now.total(f.BATCH_LIMIT, **me),
        transferring=stretch.rate(f.TRANSFER_SECONDS, "_sum", **me),
        prompts_waiting=now.total(f.REQUESTS_WAITING, **me),
        requests_waiting=now.total(f.REQUESTS_WAITING, role=_ROUTER),
    )


def _part(of: float, whole: float) -> float:
    return of / whole if whole > 0 else 0.0
