"""The hours of a real cluster's day: the clients' requests in each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.observability.request_outcome import Outcome
from tandem.cli.load.report import LoadReport
from tandem.cli.load.slo import SloCell
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.workload import Arrival, Workload
from tandem.protocol.errors import InvalidArgument

HOUR_BITS = 32
"""Bits for the number of a request within its hour, so that prompts of two hours share nothing."""
_PROMPT_SIGMA, _ANSWER_SIGMA = 0.5, 0.3


@dataclass(frozen=True, slots=True)
class LiveHour:
    """A period with a constant request mix; `rate` in requests per second."""

    name: str
    rate: float
    source: Synthetic

    def workload(self, seconds: float, seed: int) -> Workload:
        """Returns the requests of such an hour."""
        return replace(self.source.at(self.rate, seconds, seed), name=self.name)


def parse_hour(text: str) -> LiveHour:
    """Parses NAME:RATE:PROMPT:ANSWER, mean lengths in tokens. InvalidArgument describes errors."""
    try:
        name, rate, prompt, answer = text.split(":")
        per_s = float(rate)
    except ValueError:
        raise InvalidArgument("--hour", f"{text!r} is not NAME:RATE:PROMPT_TOKENS:ANSWER_TOKENS") from None
    if not per_s > 0:
        raise InvalidArgument("--hour", f"{text!r} needs a rate above 0")
    prompts = Lengths.parse("--hour", f"lognormal:{prompt}:{_PROMPT_SIGMA}")
    return LiveHour(name, per_s, Synthetic(prompts, Lengths.parse("--hour", f"lognormal:{answer}:{_ANSWER_SIGMA}")))


@dataclass(frozen=True, slots=True)
class LiveDay:
    """Hours of `seconds` each, after `warmup_s` seconds with the last hour's mix that do not count."""

    hours: Sequence[LiveHour]
    seconds: float
    seed: int = 0
    warmup_s: float = 0.0

    @property
    def end_s(self) -> float:
        """The end of the last hour."""
        return self.warmup_s + self.seconds * len(self.hours)

    @property
    def workload(self) -> Workload:
        """The requests of all hours; two hours of a kind have different requests."""
        warmup = [(0.0, self.hours[-1].workload(self.warmup_s, self.seed + len(self.hours)))] if self.warmup_s else []
        parts = [
            (self.warmup_s + number * self.seconds, hour.workload(self.seconds, self.seed + number))
            for number, hour in enumerate(self.hours)
        ]
        arrivals = [
            Arrival(
                begin_s + arrival.due_s,
                tuple(replace(block, key=(number << HOUR_BITS) + block.key) for block in arrival.prompt),
                arrival.new_tokens,
            )
            for number, (begin_s, part) in enumerate([*warmup, *parts])
            for arrival in part.arrivals
        ]
        return Workload("day", len(arrivals) / self.end_s, self.end_s, self.seed, tuple(arrivals))

    def hour_of(self, due_s: float) -> int | None:
        """Returns the number of the hour in which a request is due; None = during the warm-up."""
        if due_s < self.warmup_s:
            return None
        return min(int((due_s - self.warmup_s) / self.seconds), len(self.hours) - 1)

    def met(self, report: LoadReport, cell: SloCell) -> tuple[list[int], list[int]]:
        """Returns for each hour the requests that met the cell, and all requests, by due time."""
        due, met = Counter[int | None](), Counter[int | None]()
        for record in report.records:
            due[self.hour_of(record.due_s)] += 1
            met[self.hour_of(record.due_s)] += cell.judge(record) is Outcome.MET
        numbers = range(len(self.hours))
        return [met[number] for number in numbers], [due[number] for number in numbers]

    def due_per_s(self) -> dict[str, float]:
        """Returns requests per second of the hours of each kind, as drawn."""
        due = Counter(self.hour_of(arrival.due_s) for arrival in self.workload.arrivals)
        seconds, total = Counter[str](), Counter[str]()
        for number, hour in enumerate(self.hours):
            seconds[hour.name] += 1
            total[hour.name] += due[number]
        return {name: total[name] / (seconds[name] * self.seconds) for name in seconds}
