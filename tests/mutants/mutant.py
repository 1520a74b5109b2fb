"""A mutant: a small change of the product that breaks a promise, and the tests that must fail because of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replaces the text `old` of `file`, which has it once, with `new`; paths are relative to the repository."""

    promise: str
    """What the product promises, and the mutant breaks."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, source: str) -> str:
        """Returns the changed source. Raises ValueError unless the source has `old` exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.file} has this {count} times, and not once; adapt the mutant:\n{self.old}")
        return source.replace(self.old, self.new)
