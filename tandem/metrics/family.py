"""The definition of a metric: name, type, help text, labels and buckets."""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "tandem_"


class Kind(StrEnum):
    """Metric types, named as in Prometheus."""

    COUNTER = "counter"
    """A value that only increases while the process runs; its name ends in `_total`."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """The definition of one metric; its name includes its unit.

    Every series also has the labels of its process (`registry.py`).
    """

    name: str
    """The metric's name without its prefix."""
    kind: Kind
    help: str
    """The help text: one sentence for operators."""
    labels: tuple[str, ...] = ()
    """Label names. Each label has few values, all known in advance: never an id, a key or client input.

    A label of the family overrides a label of the process with the same name.
    """
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without infinity."""
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        """The name as exported to Prometheus."""
        return self.prefix + self.name


def counter(name: str, text: str, *labels: str) -> Family:
    """Return a counter. Raises ValueError unless its name ends in `_total`."""
    if not name.endswith("_total"):
        raise ValueError(f"the counter {name} must end in _total")
    return Family(name, Kind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: str) -> Family:
    """Return a gauge."""
    return Family(name, Kind.GAUGE, text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    """Return a histogram whose buckets have these upper bounds."""
    return Family(name, Kind.HISTOGRAM, text, labels, buckets)
