"""What a metric is: its name, type, help, labels and buckets, said once."""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "tandem_"


class Kind(StrEnum):
    """As Prometheus has them."""

    COUNTER = "counter"
    """Only grows while the process lives; its name ends in `_total`."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. Its unit is in its name. Every series has the labels of its process as well (`board.py`)."""

    name: str
    """Without the prefix."""
    kind: Kind
    help: str
    """A sentence, for operators."""
    labels: tuple[str, ...] = ()
    """Each with few values, all of them known before the first request: never an id, a key or a client's words. One
    that the process has as well stands in its place."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, growing, without infinity."""

    @property
    def full_name(self) -> str:
        """As Prometheus knows it."""
        return PREFIX + self.name


def counter(name: str, text: str, *labels: str) -> Family:
    """A counter; its name must end in `_total`."""
    if not name.endswith("_total"):
        raise ValueError(f"the counter {name} must end in _total")
    return Family(name, Kind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: str) -> Family:
    """A gauge."""
    return Family(name, Kind.GAUGE, text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    """A histogram."""
    return Family(name, Kind.HISTOGRAM, text, labels, buckets)
