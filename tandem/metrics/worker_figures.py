"""Computes a worker's measurements for its diagnosis from two scrapes of the cluster."""

from tandem.metrics import families as f
from tandem.metrics.bottlenecks import Figures
from tandem.metrics.family import Family
from tandem.metrics.scrape import Scrape, ScrapeInterval

_ROUTER = "router"


def figures_of(interval: ScrapeInterval, worker: str) -> Figures:
    """Return the measurements of `worker` in this interval; 0 for metrics that it did not export."""
    now, me = interval.now, {"worker": worker}
    busy_s = interval.grown(f.STEP_BUSY, **me)
    others = set(now.values(f.TRANSFER_WRITING, "worker")) - {worker}
    return Figures(
        steps=interval.grown(f.STEP_SECONDS, "_count", **me),
        busy=min(1.0, _part(busy_s, interval.seconds)),
        compute=_part(interval.grown(f.STEP_FLOPS, **me), busy_s * now.total(f.DEVICE_FLOPS, **me)),
        bandwidth=_part(interval.grown(f.STEP_BYTES, **me), busy_s * now.total(f.DEVICE_BANDWIDTH, **me)),
        collectives=_part(interval.grown(f.STEP_COLLECTIVES, **me), busy_s),
        kv_used=now.total(f.KV_USAGE, **me),
        holders=now.total(f.REQUESTS_RUNNING, **me) + now.total(f.OPEN_LEASES, **me),
        refused=interval.grown(f.KV_REFUSALS, **me),
        preempted=interval.grown(f.PREEMPTIONS, **me),
        decoding=interval.mean(f.STEP_DECODE_ROWS, **me) or 0.0,
        batch_limit=now.total(f.BATCH_LIMIT, **me),
        transferring=interval.rate(f.TRANSFER_WRITING, **me),
        arriving=_part(_at_both_ends(interval, f.KV_PAGES, state="advertised", **me), _pages(now, worker)),
        others_transferring=max((interval.rate(f.TRANSFER_WRITING, worker=peer) for peer in others), default=0.0),
        prompts_waiting=_at_both_ends(interval, f.REQUESTS_WAITING, **me),
        requests_waiting=_at_both_ends(interval, f.REQUESTS_WAITING, role=_ROUTER),
    )


def _pages(now: Scrape, worker: str) -> float:
    """Return a worker's total number of KV pages.

    Reserved pages are also counted in another state, so they are subtracted.
    """
    return now.total(f.KV_PAGES, worker=worker) - now.total(f.KV_PAGES, state="reserved", worker=worker)


def _at_both_ends(interval: ScrapeInterval, family: Family, **labels: str) -> float:
    """Return the smaller of a gauge's values at the start and at the end of the interval."""
    return min(interval.before.total(family, **labels), interval.now.total(family, **labels))


def _part(of: float, whole: float) -> float:
    return of / whole if whole > 0 else 0.0
