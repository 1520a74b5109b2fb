"""Explores every state of a small world, breadth first: an explicit-state model check over real parts of the product.

A world is a fresh object with actions. A state is reached by the actions that lead to it, which are played again in a
new world for each of its successors, because real parts cannot be copied. Two states with the same key are one state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tests.model.checks import Broken

Action = tuple[str, int, int]


class SmallWorld(Protocol):
    """A world with few states."""

    def actions(self) -> Iterable[Action]:
        """Returns the actions that are possible now."""

    def act(self, action: Action) -> None:
        """Plays one action. Raises Broken if it breaks an invariant."""

    def key(self) -> Hashable:
        """Returns the state; times are relative to the present."""

    def end(self) -> None:
        """Lets everything in flight end without further faults, and checks that nothing is left."""


@dataclass(frozen=True, slots=True)
class Explored:
    """The numbers of states and of steps between them, the most steps that a state needs, and the time in seconds."""

    states: int
    steps: int
    depth: int
    seconds: float


def explore(make: Callable[[], SmallWorld]) -> Explored:
    """Visits each state that actions can reach, and ends the world from each. Raises Broken with the actions."""
    began_s, steps, depth = time.monotonic(), 0, 0
    seen = {make().key()}
    paths: list[tuple[Action, ...]] = [()]
    for path in paths:  # which grows
        depth = len(path)
        for action in _ended(make, path):
            world = _played(make, (*path, action))
            steps += 1
            if (key := world.key()) not in seen:
                seen.add(key)
                paths.append((*path, action))
    return Explored(len(paths), steps, depth, time.monotonic() - began_s)


def _ended(make: Callable[[], SmallWorld], path: tuple[Action, ...]) -> list[Action]:
    """Ends a world after a path, and returns the actions that were possible before the end."""
    world = _played(make, path)
    actions = list(world.actions())
    try:
        world.end()
    except Exception as error:
        raise Broken(f"{error!r} at the end after {spelled(path)}") from error
    return actions


def _played(make: Callable[[], SmallWorld], path: tuple[Action, ...]) -> SmallWorld:
    world = make()
    for number, action in enumerate(path):
        try:
            world.act(action)
        except Exception as error:
            raise Broken(f"{error!r} after {spelled(path[: number + 1])}") from error
    return world


def spelled(path: tuple[Action, ...]) -> str:
    """Returns the actions as text: the name and the numbers of each."""
    return ", ".join(f"{name}({first}, {second})" for name, first, second in path) or "no action"
