"""Measures one operation in two forms, fused and in parts, on the same inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from benchmarks.gpu.ceilings import graph_seconds, median_seconds
from benchmarks.gpu.race import race

_LEAST_LAUNCHES = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of one operation in both forms on `tokens` tokens; `bytes` is None except for elementwise work."""

    name: str
    tokens: int
    fused: float
    unfused: float
    bytes: int | None

    @property
    def ratio(self) -> float:
        """The fused form's speed / that of the parts."""
        return self.unfused / self.fused

    def share(self, copy: float) -> float | None:
        """Returns the fused form's bandwidth / a copy's; it can exceed 1 for inputs smaller than L2."""
        return None if self.bytes is None else self.bytes / self.fused / copy


@dataclass(frozen=True, slots=True)
class Contest:
    """An operation in both forms, launched on each of `inputs` in turn."""

    name: str
    tokens: int
    inputs: Sequence[Any]
    fused: Callable[[Any], object]
    unfused: Callable[[Any], object]
    bytes: int | None = None
    asks_host: bool = False
    """True if the unfused form waits for the device, so that no graph can hold it."""
    heats: bool = False
    """True if the forms compute so much that they must take turns on a heated chip, without graphs."""

    def measure(self) -> Comparison:
        """Measures both forms on this process's GPU."""
        if self.heats:
            found = race({"fused": self._in_turn(self.fused), "unfused": self._in_turn(self.unfused)})
            return Comparison(self.name, self.tokens, found["fused"] / 1e6, found["unfused"] / 1e6, self.bytes)
        size = len(self.inputs)
        launches = size * -(-_LEAST_LAUNCHES // size)
        fused = graph_seconds(lambda n: self.fused(self.inputs[n % size]), launches)
        if self.asks_host:
            unfused = median_seconds(lambda: self.unfused(self.inputs[0]), rounds=7, warm=2)
        else:
            unfused = graph_seconds(lambda n: self.unfused(self.inputs[n % size]), launches)
        return Comparison(self.name, self.tokens, fused, unfused, self.bytes)

    def _in_turn(self, form: Callable[[Any], object]) -> Callable[[], object]:
        inputs = cycle(self.inputs)
        return lambda: form(next(inputs))
