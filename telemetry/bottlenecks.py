"""What keeps a worker from doing more, from measured figures: the diagnosis first, then the one change that helps most.

A step reads bytes and does operations, and each takes its part of the step's time at the device's ceilings (the
roofline: Williams, Waterman and Patterson, CACM 2009). What neither explains is the host's: launches, planning, kernels
that fall short. The largest of the three parts binds a worker that computes most of the time. Before that come bottlenecks
that keep it from computing: pages that leave more slowly than they are made, no KV pages, no room in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

KV_FULL = 0.9
"""Part of the KV pages from which on they are what somebody waits for."""
BATCH_FULL = 0.9
"""The same of the batch's rows."""
TRANSFERRING = 0.7
"""Part of the time with pages on the wire from which on those who wait wait for it, if the engine has less to do."""
BACKLOG = 0.05
"""Part of the KV pages from which on hand-overs are not only many, but more than leave."""
PILED_UP = 2.0
"""Hand-overs that write at once, on average, from which on they pile up, whoever waits yet."""
ON_THEIR_WAY = 0.5
"""Part of the pages that are taken from which on it is prompts on the wire that hold them."""
COMPUTING = 0.5
"""Part of the time in steps from which on what is in them binds."""


class Bottleneck(StrEnum):
    """What binds."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    KV_CAPACITY = "KV capacity"
    TRANSFER = "transfer"
    QUEUE = "queue"
    HOST = "host"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a worker did in a stretch of time."""

    steps: float
    """Steps that ended."""
    busy: float
    """Part of the time that it was in them; a step counts when it ends."""
    compute: float
    """Operations of these steps, as a part of what the device could have done in their time."""
    bandwidth: float
    """The same of bytes."""
    kv_used: float
    """Part of its KV pages in use or promised, at the end."""
    holders: float
    """Requests that have them then: those that decode, and prompts on their way here."""
    refused: float
    """How often none could be promised to a request, which went back to wait."""
    preempted: float
    """Requests that lost their pages."""
    decoding: float
    """Mean requests in steps that decode; 0 if none did."""
    batch_limit: float
    """Most of them."""
    transferring: float
    """Hand-overs of its own that write at once, on average: seconds for each second, also of those that do not end."""
    arriving: float
    """Part of its KV pages that hand-overs of others write, all the time."""
    others_transferring: float
    """The same as `transferring` of the one among the other workers that has the most."""
    prompts_waiting: float
    """Prompts that it has not wholly computed, all the time."""
    requests_waiting: float
    """Requests in the routers' queues, all the time."""

    @property
    def pages_missing(self) -> bool:
        """Whether somebody waits for KV pages: one more request like those that are here has no room."""
        one = self.kv_used / self.holders if self.holders else 0.0
        full = self.kv_used >= KV_FULL or self.kv_used + one > 1.0 or self.refused > 0
        return self.preempted > 0 or (full and self.requests_waiting > 0)

    @property
    def wire_is_narrow(self) -> bool:
        """Whether pages leave more slowly than they are made: hand-overs that overlap do no harm while the engine
        computes on beside them and they hold next to no pages.
        """
        somebody_waits = self.requests_waiting > 0 or self.prompts_waiting > 0
        enough = TRANSFERRING if somebody_waits else PILED_UP
        harm = self.busy < COMPUTING or self.kv_used >= BACKLOG
        return harm and self.transferring >= enough and self.transferring > self.busy

    @property
    def wires_hold_pages(self) -> bool:
        """Whether most of the pages that are taken here wait for others, whose hand-overs pile up."""
        return self.arriving >= ON_THEIR_WAY * self.kv_used > 0 and self.others_transferring >= PILED_UP

    @property
    def rest(self) -> float:
        """Part of the steps' time that neither arithmetic nor memory explains."""
        return max(0.0, 1.0 - self.compute - self.bandwidth)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`bottleneck` binds, `because` of these figures; `change` would help most."""

    bottleneck: Bottleneck
    because: str
    change: str


_CHANGES = {
    Bottleneck.COMPUTE: "one more worker that computes prompts; or less to compute: cached prefixes, a smaller dtype",
    Bottleneck.BANDWIDTH: "larger batches, which read the weights once for more answers; or a smaller dtype",
    Bottleneck.KV_CAPACITY: "more KV pages: a larger --kv-cache-gib or --memory-fraction, or one more worker that decodes",
    Bottleneck.TRANSFER: "a faster wire (`tandem doctor` names what is there); or --mode adaptive, which sends fewer prompts",
    Bottleneck.QUEUE: "a larger --max-batch-requests: a step costs little more for each request in it",
    Bottleneck.HOST: "less work beside the device: CPU cores of its own, CUDA graphs that fit its batches, larger steps",
    Bottleneck.NONE: "nothing: it can take more",
}
_LOOK_LONGER = "a longer look (--seconds): a step of this device takes longer than that"
_NOT_TAKEN = (
    "larger chunks: another --step-policy, a larger --max-step-tokens, or an inter-token target that allows them"
)


def diagnose(it: Figures) -> Diagnosis:
    """Of one worker. What holds pages, a slow wire for one, comes before the pages that it holds."""
    if it.wire_is_narrow:
        on_the_wire = f"hand-overs write {it.transferring:.2f} s in each second"
        return _found(Bottleneck.TRANSFER, f"{on_the_wire}, and it computes {it.busy:.0%} of the time")
    if it.pages_missing and it.wires_hold_pages and not it.preempted:
        held = f"{it.arriving:.0%} of its KV pages wait for hand-overs to it, {_waiting(it)}"
        return _found(Bottleneck.TRANSFER, f"{held}; they write {it.others_transferring:.2f} s in each second")
    if it.pages_missing:
        return _found(Bottleneck.KV_CAPACITY, f"{it.kv_used:.0%} of its KV pages are taken, {_waiting(it)}{_lost(it)}")
    if not it.steps and it.prompts_waiting > 0:
        return Diagnosis(Bottleneck.NONE, f"no step of its has ended, though {_waiting(it)}", _LOOK_LONGER)
    return _of_engine(it)


def _of_engine(it: Figures) -> Diagnosis:
    """Whose pages suffice."""
    bottleneck = _in_steps(it) if it.busy >= COMPUTING else Bottleneck.NONE
    full = it.batch_limit > 0 and it.decoding >= BATCH_FULL * it.batch_limit
    if full and it.requests_waiting > 0 and bottleneck is not Bottleneck.COMPUTE:
        rows = f"its batch is full, {it.decoding:.0f} of {it.batch_limit:.0f} requests"
        return _found(Bottleneck.QUEUE, f"{rows}, {_waiting(it)}, and KV pages are left ({it.kv_used:.0%} taken)")
    if bottleneck is not Bottleneck.NONE:
        return _found(bottleneck, f"it computes {it.busy:.0%} of the time, {_parts(it)}")
    because = f"it computes {it.busy:.0%} of the time"
    if it.prompts_waiting > 0:
        return Diagnosis(Bottleneck.QUEUE, f"{because}, though {_waiting(it)}", _NOT_TAKEN)
    elsewhere = ", and what waits at routers waits for other workers" if it.requests_waiting > 0 else ""
    return _found(Bottleneck.NONE, because + elsewhere)


def _found(bottleneck: Bottleneck, because: str) -> Diagnosis:
    return Diagnosis(bottleneck, because, _CHANGES[bottleneck])


def _in_steps(it: Figures) -> Bottleneck:
    """What takes most of the steps' time."""
    largest = max(it.compute, it.bandwidth, it.rest)
    if it.compute == largest:
        return Bottleneck.COMPUTE
    return Bottleneck.BANDWIDTH if it.bandwidth == largest else Bottleneck.HOST


def _parts(it: Figures) -> str:
    at = f"at {it.compute:.0%} of the device's arithmetic and {it.bandwidth:.0%} of its memory bandwidth"
    return f"{at}; {it.rest:.0%} of its time is neither"


def _waiting(it: Figures) -> str:
    return f"{it.requests_waiting:.0f} requests wait at routers, {it.prompts_waiting:.0f} prompts here"


def _lost(it: Figures) -> str:
    refused = f"; {it.refused:.0f} times it had none for one, beside what its prompts need" if it.refused > 0 else ""
    return refused + (f"; {it.preempted:.0f} requests lost theirs to others" if it.preempted > 0 else "")
