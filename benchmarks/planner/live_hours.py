"""Hours of a real cluster's day: what clients ask in each, one after the other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.load.report import LoadReport
from benchmarks.load.slo import SloCell
from benchmarks.load.synthetic import Lengths, Synthetic
from benchmarks.load.workload import Arrival, Workload
from router.observability.verdict import Outcome
from wire.errors import InvalidArgument

HOUR_BITS = 32
"""More than requests of an hour: prompts of two hours have nothing in common."""
_PROMPT_SIGMA, _ANSWER_SIGMA = 0.5, 0.3


@dataclass(frozen=True, slots=True)
class LiveHour:
    """A stretch of time in which the mix stays as it is; `rate` in requests a second."""

    name: str
    rate: float
    source: Synthetic

    def workload(self, seconds: float, seed: int) -> Workload:
        return replace(self.source.at(self.rate, seconds, seed), name=self.name)


def parse_hour(text: str) -> LiveHour:
    """From NAME:RATE:PROMPT:ANSWER, mean lengths in tokens. InvalidArgument says what is wrong."""
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
    """Hours of `seconds` each; `dawn_s` seconds like the last of them go before, and count for nothing."""

    hours: Sequence[LiveHour]
    seconds: float
    seed: int = 0
    dawn_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.dawn_s + self.seconds * len(self.hours)

    @property
    def workload(self) -> Workload:
        """Every hour of a kind has other requests."""
        dawn = [(0.0, self.hours[-1].workload(self.dawn_s, self.seed + len(self.hours)))] if self.dawn_s else []
        parts = [
            (self.dawn_s + number * self.seconds, hour.workload(self.seconds, self.seed + number))
            for number, hour in enumerate(self.hours)
        ]
        arrivals = [
            Arrival(
                begin_s + arrival.due_s,
                tuple(replace(block, key=(number << HOUR_BITS) + block.key) for block in arrival.prompt),
                arrival.new_tokens,
            )
            for number, (begin_s, part) in enumerate([*dawn, *parts])
            for arrival in part.arrivals
        ]
        return Workload("day", len(arrivals) / self.end_s, self.end_s, self.seed, tuple(arrivals))

    def hour_of(self, due_s: float) -> int | None:
        """The number of the hour in which a request is due; None = in none."""
        if due_s < self.dawn_s:
            return None
        return min(int((due_s - self.dawn_s) / self.seconds), len(self.hours) - 1)

    def met(self, report: LoadReport, cell: SloCell) -> tuple[list[int], list[int]]:
        """Requests of a day's load that kept their promise, and all, of each hour, by the moment they were due."""
        due, met = Counter[int | None](), Counter[int | None]()
        for record in report.records:
            due[self.hour_of(record.due_s)] += 1
            met[self.hour_of(record.due_s)] += cell.judge(record) is Outcome.MET
        numbers = range(len(self.hours))
        return [met[number] for number in numbers], [due[number] for number in numbers]

    def due_per_s(self) -> dict[str, float]:
        """Requests a second of the hours of each kind, as they were drawn."""
        due = Counter(self.hour_of(arrival.due_s) for arrival in self.workload.arrivals)
        seconds, total = Counter[str](), Counter[str]()
        for number, hour in enumerate(self.hours):
            seconds[hour.name] += 1
            total[hour.name] += due[number]
        return {name: total[name] / (seconds[name] * self.seconds) for name in seconds}
