"""The steps with prompts that were launched and whose results are not here yet."""

import math
from collections import deque
from collections.abc import Sequence

from prefill_worker.request import PrefillRequest

Step = Sequence[tuple[PrefillRequest, int]]
"""The requests of a step, with the tokens of each."""


class LaunchedSteps:
    """Oldest first. Guarded by the half's lock."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()

    def launch(self, step: Step) -> None:
        """It has at least one request."""
        self._steps.append(step)

    def land(self) -> Step:
        """The results of the oldest are here."""
        return self._steps.popleft()

    def give_up(self) -> list[PrefillRequest]:
        """None of them will end. Returns their requests, which are in no step any more."""
        left = {request: None for step in self._steps for request, _ in step}
        self._steps.clear()
        for request in left:
            request.in_flight = 0
        return list(left)

    @property
    def first_gap_s(self) -> float:
        """The tightest that local prompts bear which end in the newest step; infinite = none does."""
        return min((each.first_gap_s for each, _ in self._steps[-1] if not each.remaining), default=math.inf)
