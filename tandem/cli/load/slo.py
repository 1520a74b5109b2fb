"""SLO cells: limits of a request's latencies, and the outcome of a request with these limits."""

import math
from dataclasses import dataclass

from router.observability.request_outcome import Outcome
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.spread import percentile
from tandem.protocol.errors import InvalidArgument

GAP_PERCENT = 99.0
"""Default percentile of a request's own inter-token gaps to which the gap limit applies."""
STRICT_STEPS = 2.0
"""The gap limit of the strict cell, as a multiple of an idle cluster's decode step."""


@dataclass(frozen=True, slots=True)
class SloCell:
    """Latency limits in seconds: for the TTFT from the due time, and for a percentile of a request's own gaps."""

    name: str
    ttft_s: float
    gap_s: float
    gap_percent: float = GAP_PERCENT

    def as_result(self) -> dict[str, float | None]:
        """Return the cell as JSON; None = no limit."""
        limits = (round(limit_s * 1e3, 4) if limit_s < math.inf else None for limit_s in (self.ttft_s, self.gap_s))
        ttft_ms, gap_ms = limits
        return {"ttft_ms": ttft_ms, "gap_ms": gap_ms, "gap_percent": self.gap_percent}

    def judge(self, record: RequestRecord) -> Outcome:
        """Return the outcome of a request with the limits of this cell.

        REJECTED = at once, for lack of capacity, FAILED = without a complete answer for another reason.
        """
        if record.error:
            return Outcome.REJECTED if record.rejected else Outcome.FAILED
        if record.ttft_s is None or record.ttft_s > self.ttft_s:
            return Outcome.MISSED_TTFT
        gaps = record.gaps_s
        return Outcome.MISSED_ITL if gaps and percentile(gaps, self.gap_percent) > self.gap_s else Outcome.MET


def standard_cells(step_s: float) -> tuple[SloCell, ...]:
    """Return the cells strict, balanced and quick; `step_s` is the decode step of an idle cluster in seconds."""
    return (
        SloCell("strict", ttft_s=2.0, gap_s=STRICT_STEPS * step_s),
        SloCell("balanced", ttft_s=1.0, gap_s=0.025),
        SloCell("quick", ttft_s=0.3, gap_s=0.060),
    )


def parse_cell(text: str) -> SloCell:
    """Parse "name:TTFT_MS:GAP_MS" or "name:TTFT_MS:GAP_MS:PERCENT". Raises InvalidArgument for any other form."""
    name, *numbers = text.split(":")
    try:
        ttft_ms, gap_ms, *rest = (float(number) for number in numbers)
        (percent,) = rest or (GAP_PERCENT,)
    except ValueError:
        raise InvalidArgument("--slo", f"{text!r} is not NAME:TTFT_MS:GAP_MS[:PERCENT]") from None
    if not name or not (ttft_ms > 0 and gap_ms > 0 and 0 < percent <= 100):
        raise InvalidArgument("--slo", f"{text!r} needs a name, limits above 0 and a percentile above 0 and up to 100")
    return SloCell(name, ttft_ms / 1e3, gap_ms / 1e3, percent)
