"""The prompts that are not wholly computed, and which of them the next step computes.

The shortest remainder first: a short prompt does not wait behind the chunks of a long one, and the mean time to the
first token is the least that any order gives. But the oldest prompt has a part of every step to itself, so that a
stream of short ones slows a long one down and never stops it; whatever the others leave is its as well.

Pages are taken in the same order. Once one that comes first has no room, no other prompt starts: what is given back
is for it. Local prompts do: their pages were promised to them, and the one that waits may be waiting for just these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from prefill_worker.request import PrefillRequest

OLDEST_SHARE = 4
"""The oldest prompt has one token in so many."""


class Start(Enum):
    """What became of a prompt that was to get its pages."""

    STARTED = 1
    NO_ROOM = 2
    FAILED = 3
    """It is over, and somebody hears of it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits, as far as a step's policy wants to know."""

    prompts: int = 0
    tokens: int = 0
    """Of all of them, not launched yet; those that turn out to be cached are still counted."""
    context: int = 0
    """Computed or cached tokens of the oldest or the shortest, whichever are more: what a chunk attends to."""


NOTHING_WAITS = Waiting()


class PromptLine:
    """In order of arrival. Guarded by the half's lock; the requests' pages are none of its business."""

    def __init__(self) -> None:
        self._waiting: dict[PrefillRequest, None] = {}
        """Without pages."""
        self._computing: dict[PrefillRequest, None] = {}
        """With pages; until the step with their last chunk has ended."""
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._computing)

    def __iter__(self) -> Iterator[PrefillRequest]:
        yield from self._computing
        yield from self._waiting

    def add(self, request: PrefillRequest) -> None:
        """At the end of the line."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._waiting[request] = None

    def leave(self, request: PrefillRequest) -> None:
        """It is computed, or never will be. Nothing if it has left."""
        self._waiting.pop(request, None)
        self._computing.pop(request, None)

    def waiting(self) -> Waiting:
        """Only what a step could compute."""
        rest = [request for request in self if request.remaining and not request.withdrawn]
        if not rest:
            return NOTHING_WAITS
        # These two get most of a step: a policy that counted with the shorter context would make it too long.
        context = max(min(rest, key=_ARRIVAL).launched, min(rest, key=_REMAINING).launched)
        return Waiting(len(rest), sum(request.remaining for request in rest), context)

    def plan(
        self, budget: int, max_rows: int, start: Callable[[PrefillRequest], Start]
    ) -> list[tuple[PrefillRequest, int]]:
        """Who gets how many tokens, more than none, of a step of `budget` tokens and `max_rows` rows.

        `start` takes the pages of a request that comes to its first chunk.
        """
        parts: dict[PrefillRequest, int] = {}
        blocked = False
        for request, most in self._turns(budget):
            if budget <= 0:
                break
            if request in self._waiting:
                if (blocked and not request.local) or len(parts) >= max_rows:
                    continue
                blocked |= not self._start(request, start)
            if request not in self._computing or (request not in parts and len(parts) >= max_rows):
                continue
            given = parts.get(request, 0)
            tokens = min(budget, most, request.remaining - given)
            if tokens > 0:
                parts[request] = given + tokens
                budget -= tokens
        return list(parts.items())

    def _start(self, request: PrefillRequest, start: Callable[[PrefillRequest], Start]) -> bool:
        """Whether those behind it may start as well."""
        match start(request):
            case Start.STARTED:
                del self._waiting[request]
                self._computing[request] = None
            case Start.FAILED:
                del self._waiting[request]
            case Start.NO_ROOM:
                return False
        return True

    def _turns(self, budget: int) -> list[tuple[PrefillRequest, int]]:
        """Requests in the order in which they are asked, with the most that each takes this time."""
        ready = [request for request in self if request.remaining and not request.withdrawn]
        if len(ready) < 2:
            return [(request, budget) for request in ready]
        oldest = min(ready, key=_ARRIVAL)
        share = max(1, budget // OLDEST_SHARE)
        ready.sort(key=_ARRIVAL)
        ready.sort(key=_REMAINING)
        return [(oldest, share), *((request, budget) for request in ready)]


_ARRIVAL = attrgetter("arrival")
_REMAINING = attrgetter("remaining")
