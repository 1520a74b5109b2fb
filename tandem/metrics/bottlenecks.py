"""Finds a worker's bottleneck from its metrics, and the single change that helps most.

A step reads bytes and does operations; each takes a share of the step's time at the device's ceilings (the roofline:
Williams, Waterman and Patterson, CACM 2009). If the worker has several GPUs, another share is the predicted time of
their collective operations. The remaining share is the host's: launches, planning, kernels below the ceilings. The
largest share is the bottleneck of a worker that computes most of the time. Bottlenecks that keep a worker from
computing are checked first: transfers slower than prefill, no free KV pages, a full batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

KV_FULL = 0.9
"""Share of used KV pages above which waiting requests are assumed to wait for pages."""
BATCH_FULL = 0.9
"""Share of the decode batch's rows in use above which the batch counts as full."""
TRANSFERRING = 0.7
"""Minimum average number of concurrent hand-overs at which transfers are the bottleneck while requests wait."""
BACKLOG = 0.05
"""Minimum share of used KV pages at which slow hand-overs count as the bottleneck of a worker that is busy.

A worker is busy if it spends at least the share `COMPUTING` of the time in steps. Its hand-overs do not slow it down
while fewer pages are used.
"""
CONCURRENT_TRANSFERS = 2.0
"""Minimum average number of concurrent hand-overs at which transfers are the bottleneck although no request waits."""
IN_TRANSFER = 0.5
"""If incoming transfers hold at least this share of the used pages, they are the cause of missing pages."""
COMPUTING = 0.5
"""If a worker spends at least this share of the time in steps, its bottleneck is within the steps."""


class Bottleneck(StrEnum):
    """The resource that limits a worker's throughput."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    KV_CAPACITY = "KV capacity"
    TRANSFER = "transfer"
    QUEUE = "queue"
    COLLECTIVES = "collectives"
    HOST = "host"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one worker over the interval between two scrapes."""

    steps: float
    """Number of steps that ended."""
    busy: float
    """Share of the time that was spent in steps; a step counts when it ends."""
    compute: float
    """Operations of these steps ÷ the operations that the device could have done in the same time."""
    bandwidth: float
    """Bytes that these steps read ÷ the bytes that the device could have read in the same time."""
    collectives: float
    """Share of the steps' time in which the worker's GPUs exchange data, as predicted; 0 for a worker with one GPU."""
    kv_used: float
    """Share of the worker's KV pages, or of those for answers, in use or reserved, at the end of the interval."""
    holders: float
    """Number of requests that hold these pages: decoding requests, and prompts in transfer to this worker."""
    refused: float
    """Number of requests that were sent back to their queue because no KV pages could be reserved."""
    preempted: float
    """Number of requests that were preempted."""
    decoding: float
    """Mean number of decode rows in steps that decode; 0 without such steps."""
    batch_limit: float
    """Maximum number of requests in a decode batch."""
    transferring: float
    """Average number of concurrent outgoing hand-overs: seconds of writes per second, unfinished writes included."""
    arriving: float
    """Share of the worker's KV pages that are reserved for incoming transfers.

    It is the smaller of the values at the start and at the end of the interval.
    """
    others_transferring: float
    """The largest value of `transferring` among the other workers."""
    prompts_waiting: float
    """Number of the worker's prompts that are not fully computed.

    It is the smaller of the values at the start and at the end of the interval, so that a prompt that has just arrived
    does not count.
    """
    requests_waiting: float
    """Number of requests in the routers' queues.

    It is the smaller of the values at the start and at the end of the interval, so that a request that has just arrived
    does not count.
    """

    @property
    def pages_missing(self) -> bool:
        """True if requests lack KV pages: some were preempted, or some wait and no pages are left for another one."""
        one = self.kv_used / self.holders if self.holders else 0.0
        full = self.kv_used >= KV_FULL or self.kv_used + one > 1.0 or self.refused > 0
        return self.preempted > 0 or (full and self.requests_waiting > 0)

    @property
    def transport_is_slow(self) -> bool:
        """True if KV transfers are the bottleneck: they take longer than prefill and slow down the worker.

        They do not slow it down while its engine keeps computing and almost no KV pages are in use.
        """
        waiting = self.requests_waiting > 0 or self.prompts_waiting > 0
        enough = TRANSFERRING if waiting else CONCURRENT_TRANSFERS
        harm = self.busy < COMPUTING or self.kv_used >= BACKLOG
        return harm and self.transferring >= enough and self.transferring > self.busy

    @property
    def transfers_hold_pages(self) -> bool:
        """True if incoming transfers hold at least `IN_TRANSFER` of the used pages, and another worker has a backlog.

        The other worker's backlog is an average of at least `CONCURRENT_TRANSFERS` hand-overs in progress.
        """
        return self.arriving >= IN_TRANSFER * self.kv_used > 0 and self.others_transferring >= CONCURRENT_TRANSFERS

    @property
    def rest(self) -> float:
        """Share of the steps' time that arithmetic, memory reads and collective operations do not explain."""
        return max(0.0, 1.0 - self.compute - self.bandwidth - self.collectives)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of a diagnosis: the bottleneck, the measurements that show it, and the change that would help most."""

    bottleneck: Bottleneck
    because: str
    change: str


_CHANGES = {
    Bottleneck.COMPUTE: "one more prefill worker; or less to compute: cached prefixes, a smaller dtype",
    Bottleneck.BANDWIDTH: "larger batches, which read the weights once for more requests; or a smaller dtype",
    Bottleneck.KV_CAPACITY: "more KV pages: a larger --kv-cache-gib or --memory-fraction, or one more decode worker",
    Bottleneck.TRANSFER: "a faster transport (`tandem doctor` lists them); or --mode adaptive, which transfers fewer",
    Bottleneck.QUEUE: "a larger --max-batch-requests: a step costs little more for each request in it",
    Bottleneck.COLLECTIVES: "a smaller --tensor-parallel-size and more workers, if the model fits on fewer GPUs",
    Bottleneck.HOST: "less host time: dedicated CPU cores, CUDA graphs that fit its batches, larger steps",
    Bottleneck.NONE: "nothing: it has capacity left",
}
_LOOK_LONGER = "a longer interval (--seconds): a step of this device takes longer"
_NOT_TAKEN = (
    "larger chunks: another --step-policy, a larger --max-step-tokens, or an inter-token target that allows them"
)


def diagnose(it: Figures) -> Diagnosis:
    """Return the bottleneck of one worker.

    Slow transfers also hold KV pages, so they are checked before the lack of pages.
    """
    if it.transport_is_slow:
        writing = f"hand-overs write {it.transferring:.2f} s in each second"
        return _advise(Bottleneck.TRANSFER, f"{writing}, and it computes {it.busy:.0%} of the time")
    if it.pages_missing and it.transfers_hold_pages and not it.preempted:
        held = f"{it.arriving:.0%} of its KV pages wait for incoming hand-overs, {_waiting(it)}"
        return _advise(Bottleneck.TRANSFER, f"{held}; they write {it.others_transferring:.2f} s in each second")
    if it.pages_missing:
        return _advise(Bottleneck.KV_CAPACITY, f"{it.kv_used:.0%} of its KV pages are taken, {_waiting(it)}{_lost(it)}")
    if not it.steps and it.prompts_waiting > 0:
        return Diagnosis(Bottleneck.NONE, f"no step has ended, though {_waiting(it)}", _LOOK_LONGER)
    return _of_engine(it)


def _of_engine(it: Figures) -> Diagnosis:
    """Return the bottleneck of a worker that does not lack KV pages."""
    bottleneck = _in_steps(it) if it.busy >= COMPUTING else Bottleneck.NONE
    full = it.batch_limit > 0 and it.decoding >= BATCH_FULL * it.batch_limit
    if full and it.requests_waiting > 0 and bottleneck is not Bottleneck.COMPUTE:
        rows = f"its batch is full, {it.decoding:.0f} of {it.batch_limit:.0f} requests"
        return _advise(Bottleneck.QUEUE, f"{rows}, {_waiting(it)}, and KV pages are left ({it.kv_used:.0%} taken)")
    if bottleneck is not Bottleneck.NONE:
        return _advise(bottleneck, f"it computes {it.busy:.0%} of the time, {_parts(it)}")
    because = f"it computes {it.busy:.0%} of the time"
    if it.prompts_waiting > 0:
        return Diagnosis(Bottleneck.QUEUE, f"{because}, though {_waiting(it)}", _NOT_TAKEN)
    elsewhere = ", and the requests at routers wait for other workers" if it.requests_waiting > 0 else ""
    return _advise(Bottleneck.NONE, because + elsewhere)


def _advise(bottleneck: Bottleneck, because: str) -> Diagnosis:
    return Diagnosis(bottleneck, because, _CHANGES[bottleneck])


def _in_steps(it: Figures) -> Bottleneck:
    """Return the resource that explains the largest share of the steps' time."""
    shares = {
        Bottleneck.COMPUTE: it.compute,
        Bottleneck.BANDWIDTH: it.bandwidth,
        Bottleneck.COLLECTIVES: it.collectives,
        Bottleneck.HOST: it.rest,
    }
    return max(shares, key=lambda bottleneck: shares[bottleneck])


def _parts(it: Figures) -> str:
    at = f"at {it.compute:.0%} of the device's arithmetic and {it.bandwidth:.0%} of its memory bandwidth"
    if it.collectives > 0:
        exchanged = f"its GPUs exchange data for {it.collectives:.0%} of its time"
        return f"{at}; {exchanged}; none of these explains {it.rest:.0%}"
    return f"{at}; neither explains {it.rest:.0%} of its time"


def _waiting(it: Figures) -> str:
    return f"{it.requests_waiting:.0f} requests wait at routers, {it.prompts_waiting:.0f} prompts here"


def _lost(it: Figures) -> str:
    refused = f"; {it.refused:.0f} refusals for lack of pages" if it.refused > 0 else ""
    return refused + (f"; {it.preempted:.0f} requests were preempted" if it.preempted > 0 else "")
