"""A simulated worker changes its role as `worker/assignment.py` does: one half opens at once, the other gets empty first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from simulation.clock import VirtualClock
from wire.messages import Role
from worker.assignment import OTHER_ROLE, Half
from worker.halves import Halves

LOOK_S = 0.1
"""How often a half that closes is looked at."""


class VirtualAssignment:
    """Which halves are open. What a half that closes still has it finishes, however long that takes."""

    def __init__(
        self, role: Role, halves: Halves, clock: VirtualClock, visit: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`visit` is held while halves are touched."""
        self.wanted = role
        """What it was told to do last."""
        self.role = role
        """The halves that are open or still finish what they have."""
        self.on_change: Callable[[], None] = lambda: None
        self._halves, self._clock, self._visit = halves, clock, visit
        self._closing: dict[Role, int] = {}
        self._changes = 0
        for half in halves.half_controls():
            if role | half.role is not role:
                half.close(OTHER_ROLE)

    @property
    def closing(self) -> Role | None:
        """The halves among `role` that take nothing new."""
        closing = list(self._closing)
        return None if not closing else closing[0] if len(closing) == 1 else Role.BOTH

    def assume(self, role: Role) -> None:
        """Do this from now on."""
        with self._visit():
            before, self._changes = self.role, self._changes + 1
            self.wanted, self.role = role, before | role
            self._halves.resize(self.role)
            for half in self._halves.half_controls():
                if role | half.role is role:
                    self._closing.pop(half.role, None)
                    half.open()
                elif before | half.role is before:
                    half.close(OTHER_ROLE)
                    self._closing[half.role] = self._changes
                    self._look(half, self._changes)
        self.on_change()

    def _look(self, half: Half, change: int) -> None:
        """Whether the half that closes by this change is empty."""
        if self._closing.get(half.role) != change:
            return
        if half.requests():
            self._clock.after(LOOK_S, lambda: self._look(half, change))
        else:
            self._clock.after(0.0, lambda: self._leave(half, change))

    def _leave(self, half: Half, change: int) -> None:
        if self._closing.get(half.role) != change:
            return
        with self._visit():
            del self._closing[half.role]
            self.role = self.role.without(half.role) or self.wanted
            self._halves.resize(self.role)
        self.on_change()
