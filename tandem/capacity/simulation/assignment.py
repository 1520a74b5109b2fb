"""The change of a simulated worker's role: one half opens at once, the other finishes first.

It does what `tandem/worker/assignment.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tandem.capacity.simulation.clock import VirtualClock
from tandem.protocol.messages import Role
from tandem.worker.assignment import OTHER_ROLE, PhaseControl
from tandem.worker.phases import PhaseSchedulers

LOOK_S = 0.1
"""Interval in seconds at which a closing half is checked for remaining requests."""


class VirtualAssignment:
    """Tracks which halves are open. A closing half finishes all its requests, however long that takes."""

    def __init__(
        self,
        role: Role,
        halves: PhaseSchedulers,
        clock: VirtualClock,
        visit: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Opens the halves of `role`; `visit` is entered while halves are changed."""
        self.wanted = role
        """The role that was assigned last."""
        self.role = role
        """The halves that are open or still finish their requests."""
        self.on_change: Callable[[], None] = lambda: None
        self._halves, self._clock, self._visit = halves, clock, visit
        self._closing: dict[Role, int] = {}
        self._changes = 0
        for half in halves.phase_controls():
            if role | half.role is not role:
                half.close(OTHER_ROLE)

    @property
    def closing(self) -> Role | None:
        """The closing halves among `role`; None without any."""
        closing = list(self._closing)
        return None if not closing else closing[0] if len(closing) == 1 else Role.BOTH

    def assume(self, role: Role) -> None:
        """Assigns this role from now on."""
        with self._visit():
            before, self._changes = self.role, self._changes + 1
            self.wanted, self.role = role, before | role
            self._halves.resize(self.role)
            for half in self._halves.phase_controls():
                if role | half.role is role:
                    self._closing.pop(half.role, None)
                    half.open()
                elif before | half.role is before:
                    half.close(OTHER_ROLE)
                    self._closing[half.role] = self._changes
                    self._look(half, self._changes)
        self.on_change()

    def _look(self, half: PhaseControl, change: int) -> None:
        """Leaves the half that this change closes once it has no requests; else checks again after `LOOK_S`."""
        if self._closing.get(half.role) != change:
            return
        if half.requests():
            self._clock.after(LOOK_S, lambda: self._look(half, change))
        else:
            self._clock.after(0.0, lambda: self._leave(half, change))

    def _leave(self, half: PhaseControl, change: int) -> None:
        if self._closing.get(half.role) != change:
            return
        with self._visit():
            del self._closing[half.role]
            self.role = self.role.without(half.role) or self.wanted
            self._halves.resize(self.role)
        self.on_change()
