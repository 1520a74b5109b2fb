"""A worker's figures for its diagnosis, read from two scrapes of the cluster."""

from telemetry import families as f
from telemetry.bottlenecks import Figures
from telemetry.family import Family
from telemetry.scrape import Scrape, Stretch

_ROUTER = "router"


def figures_of(stretch: Stretch, worker: str) -> Figures:
    """Of `worker` in this stretch; zeros where it has told nothing."""
    now, me = stretch.now, {"worker": worker}
    busy_s = stretch.grown(f.STEP_BUSY, **me)
    others = set(now.values(f.TRANSFER_WRITING, "worker")) - {worker}
    return Figures(
        steps=stretch.grown(f.STEP_SECONDS, "_count", **me),
        busy=min(1.0, _part(busy_s, stretch.seconds)),
        compute=_part(stretch.grown(f.STEP_FLOPS, **me), busy_s * now.total(f.DEVICE_FLOPS, **me)),
        bandwidth=_part(stretch.grown(f.STEP_BYTES, **me), busy_s * now.total(f.DEVICE_BANDWIDTH, **me)),
        kv_used=now.total(f.KV_USAGE, **me),
        holders=now.total(f.REQUESTS_RUNNING, **me) + now.total(f.OPEN_LEASES, **me),
        refused=stretch.grown(f.KV_REFUSALS, **me),
        preempted=stretch.grown(f.PREEMPTIONS, **me),
        decoding=stretch.mean(f.STEP_DECODE_ROWS, **me) or 0.0,
        batch_limit=now.total(f.BATCH_LIMIT, **me),
        transferring=stretch.rate(f.TRANSFER_WRITING, **me),
        arriving=_part(_all_along(stretch, f.KV_PAGES, state="advertised", **me), _pages(now, worker)),
        others_transferring=max((stretch.rate(f.TRANSFER_WRITING, worker=each) for each in others), default=0.0),
        prompts_waiting=_all_along(stretch, f.REQUESTS_WAITING, **me),
        requests_waiting=_all_along(stretch, f.REQUESTS_WAITING, role=_ROUTER),
    )


def _pages(now: Scrape, worker: str) -> float:
    """All that it has."""
    return now.total(f.KV_PAGES, worker=worker) - now.total(f.KV_PAGES, state="promised", worker=worker)


def _all_along(stretch: Stretch, family: Family, **labels: str) -> float:
    """What a gauge had at both ends: one who has just come waits for nothing."""
    return min(stretch.before.total(family, **labels), stretch.now.total(family, **labels))


def _part(of: float, whole: float) -> float:
    return of / whole if whole > 0 else 0.0
