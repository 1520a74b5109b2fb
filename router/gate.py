"""Whether a request can still be served as its class promises: said at once, not after the target has passed."""

from dataclasses import dataclass

from router.fleet import Fleet
from router.placement import AnswerOutlook, Forecast, Need, Placement
from router.queue import RequestQueue
from router.refusal import Refusal, Refused
from router.slo import BEST_EFFORT, Overload
from router.ticket import Ticket

_HALF_LIFE_S = 2.0
"""Half of what is known of the pace is forgotten after so long."""
_PRIOR_S = 0.5
"""How much the guess that every prefill worker computes all the time counts, in seconds of observation."""
_PACE_MIN = 0.02
"""Least pace, as a part of that guess."""
_SAFETY = 0.9
"""Part of a target that predictions may fill: they err, and whoever is admitted shall meet it."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 60.0


class Pace:
    """How many seconds of prompts leave the queue in a second, while anything waits there.

    This holds what no forecast of one worker does: decode workers without room, batches of short prompts, clients
    that leave.
    """

    def __init__(self) -> None:
        self._left_s = 0.0
        self._busy_s = 0.0
        self._waiting = False
        self._at = 0.0

    def note(self, now: float, waiting: bool, left_s: float = 0.0) -> None:
        """Work of `left_s` has left the queue, or none; whether any waits there now."""
        self._advance(now)
        if self._waiting:
            self._left_s += left_s
        self._waiting = waiting

    def take_back(self, now: float, left_s: float) -> None:
        """Work of `left_s` comes back, of which nothing was done."""
        self._advance(now)
        self._left_s = max(0.0, self._left_s - left_s)

    def seconds(self, now: float, workers: int) -> float:
        """A second's worth, with so many prefill workers; at most one each."""
        self._advance(now)
        pace = (self._left_s + workers * _PRIOR_S) / (self._busy_s + _PRIOR_S)
        return max(_PACE_MIN * workers, min(pace, float(workers)))

    def _advance(self, now: float) -> None:
        passed, self._at = now - self._at, now
        if self._waiting and passed > 0:
            keep = 2.0 ** (-passed / _HALF_LIFE_S)
            self._left_s *= keep
            self._busy_s = self._busy_s * keep + passed


@dataclass(frozen=True, slots=True)
class Outlook:
    """When the first token of a request is to be expected, in seconds from now, and what that rests on."""

    wait_s: float
    forecast: Forecast
    answers: int
    """That begin before it."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.forecast.ttft_s


class Gate:
    """Stands before the queue. Nobody who was admitted is turned away later."""

    def __init__(self, placement: Placement, fleet: Fleet, queue: RequestQueue, patience_s: float) -> None:
        """`patience_s`: what has no target, or missed it, goes before new requests after so long."""
        self._placement = placement
        self._fleet = fleet
        self._queue = queue
        self._patience_s = patience_s
        self.pace = Pace()

    def admit(self, ticket: Ticket, now: float, others: int = 0) -> None:
        """Give the ticket its place in time; best effort instead of a target that cannot be held, if its class says
        so, else `Refused` says how long to wait. So many `others` go with it or before it and stand in no queue yet.
        """
        need = ticket.need(now)
        forecast = self._placement.foresee(need, self._fleet)
        if forecast is not None:
            ticket.service_s = forecast.compute_s
        self.schedule(ticket)
        if forecast is None or not forecast.measured or not ticket.slo.has_targets:
            return
        outlook = self._outlook(ticket, forecast, now)
        refused = self._late(ticket, outlook) or self._slow(ticket, need, outlook, others)
        if refused is None:
            return
        if ticket.slo.overload is Overload.REJECT:
            raise refused
        self.degrade(ticket)

    def _late(self, ticket: Ticket, outlook: Outlook) -> Refused | None:
        """If its first token would come too late wherever it went."""
        target_s = ticket.slo.ttft_s
        if target_s > self._patience_s or outlook.ttft_s <= _SAFETY * target_s:
            return None
        return _refused_late(ticket, outlook)

    def _slow(self, ticket: Ticket, need: Need, outlook: Outlook, others: int) -> Refused | None:
        """If its tokens would come too far apart wherever it went."""
        if not need.decodes or not ticket.slo.has_gap_target:
            return None
        answer = self._placement.foresee_answer(need, self._fleet, outlook.answers + others, outlook.wait_s)
        return _refused_slow(ticket, answer) if answer is not None and answer.slow else None

    def degrade(self, ticket: Ticket) -> None:
        """Its target is lost: it goes behind those whose is not."""
        ticket.slo = BEST_EFFORT
        self.schedule(ticket)

    def schedule(self, ticket: Ticket) -> None:
        """When it must start. What has no target waits its turn in the order of arrival."""
        if ticket.slo.ttft_s < self._patience_s:
            ticket.start_by_s = ticket.arrived_s + ticket.slo.ttft_s - ticket.service_s
        else:
            ticket.start_by_s = ticket.arrived_s + self._patience_s

    def _outlook(self, ticket: Ticket, forecast: Forecast, now: float) -> Outlook:
        seconds, answers = self._queue.ahead(ticket.tenant, ticket.start_by_s)
        workers = len(self._fleet.prefills)
        return Outlook(seconds / self.pace.seconds(now, workers) if seconds else 0.0, forecast, answers)


def _refused_late(ticket: Ticket, outlook: Outlook) -> Refused:
    target = ticket.slo.ttft_s
    if outlook.forecast.compute_s > _SAFETY * target:
        return Refused(
            Refusal.SLO_TTFT,
            f"the first token takes {outlook.forecast.compute_s:.2g} s with nobody before it, class "
            f"{ticket.slo.name!r} promises it within {target:g} s; send a shorter prompt or choose another class",
        )
    hint = min(max(outlook.ttft_s - _SAFETY * target, _RETRY_MIN_S), _RETRY_MAX_S)
    return Refused(
        Refusal.SLO_TTFT,
        f"the first token would come after about {outlook.ttft_s:.2g} s, class {ticket.slo.name!r} promises it within "
        f"{target:g} s; try again in {hint:.2g} s or choose another class",
        retry_after_s=hint,
    )


def _refused_slow(ticket: Ticket, answer: AnswerOutlook) -> Refused:
    hint = min(max(answer.fits_s, _RETRY_MIN_S), _RETRY_MAX_S)
    return Refused(
        Refusal.SLO_ITL,
        f"tokens would come every {1e3 * answer.step_s:.2g} ms with one answer more, class {ticket.slo.name!r} is kept"
        f" up to {1e3 * answer.target_s:.2g} ms; try again in {hint:.2g} s or choose another class",
        retry_after_s=hint,
    )
