"""The queue of prompts that are not computed completely, and the prefill steps in flight.

The prompt with the fewest remaining tokens comes first. A short prompt does not wait for all chunks of a long one, and
no other order gives a lower mean time to the first token. A share of every step is reserved for the oldest prompt, so a
stream of short prompts slows a long one down but never stops it; the oldest prompt also gets the tokens that the others
leave.

Pages are allocated in the same order. As long as the first prompt finds too few free pages, no other prompt starts,
because pages that become free are meant for the first. Local prompts are the exception: their pages are reserved
already, and the prompt that waits may be waiting for these very pages.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from prefill_worker.request import PrefillRequest
from tandem.cost_model.chunks import RecentPrompts

OLDEST_SHARE = 4
"""The oldest prompt's share of a step is one in OLDEST_SHARE tokens."""
STEP_S = 0.2
"""The step time in seconds above which `ScoredTokens.most` is lowered; below half of it, `most` is raised."""
_FIRST, _LEAST = 64, 16
"""The initial and the minimum value of `ScoredTokens.most`.

The minimum is above 1 because all scored tokens of a step share one reading of the weights.
"""


class StartResult(Enum):
    """The outcome of an attempt to allocate the pages of a prompt."""

    STARTED = 1
    NO_PAGES = 2
    FAILED = 3
    """The request has ended, and its hand-over was notified."""


@dataclass(frozen=True, slots=True)
class WaitingPrompts:
    """A summary of the waiting prompts, which the step policy uses."""

    prompts: int = 0
    """The number of prompts that a step could compute."""
    tokens: int = 0
    """The number of prompt tokens that are in no launched step, including those that will be found in the cache."""
    context: int = 0
    """The number of computed or cached tokens to which the next chunk attends.

    It is the larger of the numbers for the oldest prompt and for the one with the fewest remaining tokens.
    """
    wait_s: float = 0.0
    """`RecentPrompts.wait_s` of the prompts that have started."""


NO_PROMPTS = WaitingPrompts()


class PromptQueue:
    """The prompts that are not computed completely, in order of arrival.

    Guarded by the scheduler's lock; the requests own their pages. Owned by the prefill scheduler.
    """

    def __init__(self) -> None:
        self._waiting: dict[PrefillRequest, None] = {}
        """Prompts without pages."""
        self._computing: dict[PrefillRequest, None] = {}
        """Prompts with pages, until the step with their last chunk has completed."""
        self._arrivals = 0
        self._recent = RecentPrompts()
        self.length = 0
        """The number of prompts that are not computed completely; any thread may read it."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[PrefillRequest]:
        yield from self._computing
        yield from self._waiting

    def add(self, request: PrefillRequest) -> None:
        """Append a request to the queue."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._waiting[request] = None
        self._count()

    def remove(self, request: PrefillRequest) -> None:
        """Remove a request that is computed or will not be computed, if it is queued."""
        self._waiting.pop(request, None)
        self._computing.pop(request, None)
        self._count()

    def waiting(self) -> WaitingPrompts:
        """Return a summary of the prompts that the next step could compute."""
        ready = [request for request in self if request.remaining and not request.withdrawn]
        if not ready:
            return NO_PROMPTS
        # These two prompts get most of a step. If the policy assumed the shorter context, the step would take too long.
        context = max(min(ready, key=_ARRIVAL).launched, min(ready, key=_REMAINING).launched)
        return WaitingPrompts(len(ready), sum(request.remaining for request in ready), context, self._recent.wait_s)

    def plan(
        self, budget: int, max_rows: int, start: Callable[[PrefillRequest], StartResult], scored_most: int
    ) -> list[tuple[PrefillRequest, int]]:
        """Return the requests of the next step, each with its number of tokens, which is at least one.

        The step has at most `budget` tokens and `max_rows` rows. At most `scored_most` of the tokens belong to prompts
        whose log probabilities are wanted. `start` allocates the pages of a request before its first chunk.
        """
        parts: dict[PrefillRequest, int] = {}
        blocked = False
        for request, most in self._service_order(budget):
            if budget <= 0:
                break
            if request.scores is not None and not scored_most:
                continue
            if request in self._waiting:
                if (blocked and not request.local) or len(parts) >= max_rows:
                    continue
                blocked |= not self._start(request, start)
            if request not in self._computing or (request not in parts and len(parts) >= max_rows):
                continue
            given = parts.get(request, 0)
            tokens = min(budget, most, request.remaining - given)
            if request.scores is not None:
                tokens = min(tokens, scored_most)
                scored_most -= tokens
            if tokens > 0:
                parts[request] = given + tokens
                budget -= tokens
        return list(parts.items())

    def _start(self, request: PrefillRequest, start: Callable[[PrefillRequest], StartResult]) -> bool:
        """Start a request; return False if there are too few free pages, so that no later request may start."""
        match start(request):
            case StartResult.STARTED:
                del self._waiting[request]
                self._computing[request] = None
                self._recent.add(request.task.waited_s, request.prompt_tokens - request.cached)
            case StartResult.FAILED:
                del self._waiting[request]
                self._count()
            case StartResult.NO_PAGES:
                return False
        return True

    def _count(self) -> None:
        self.length = len(self._waiting) + len(self._computing)

    def _service_order(self, budget: int) -> list[tuple[PrefillRequest, int]]:
        """Return the requests in the order of service, each with the maximum number of tokens that it may take.

        The oldest request is listed twice: first with its share, and again at its position by remaining tokens.
        """
        ready = [request for request in self if request.remaining and not request.withdrawn]
        if len(ready) < 2:
            return [(request, budget) for request in ready]
        oldest = min(ready, key=_ARRIVAL)
        share = max(1, budget // OLDEST_SHARE)
        ready.sort(key=_ARRIVAL)
        ready.sort(key=_REMAINING)
        return [(oldest, share), *((request, budget) for request in ready)]


class ScoredTokens:
    """The maximum number of scored prompt tokens per step, adapted to the measured step times. Not thread-safe.

    A token is scored if its request wants the log probabilities of the prompt. The limit is halved after a slow step
    with scored tokens, and doubled after a fast one. It is needed because the log probabilities of a prompt take as
    long as its forward pass on a GPU, and many times as long on a CPU, where a full step of scored tokens takes half a
    minute. Until a step ends, no other request gets a token, and an abort has no effect.
    """

    def __init__(self) -> None:
        self.most = _FIRST

    def observe(self, tokens: int, seconds: float) -> None:
        """Adapt the limit after a step that had `tokens` scored tokens and took `seconds`."""
        if seconds > STEP_S:
            self.most = max(_LEAST, min(self.most, tokens) // 2)
        elif tokens >= self.most and seconds < STEP_S / 2:
            self.most *= 2


Step = Sequence[tuple[PrefillRequest, int]]
"""The requests of a step, each with its number of prompt tokens in it."""


class InFlightSteps:
    """Launched steps with prompt chunks whose results have not arrived, oldest first.

    Guarded by the scheduler's lock. Owned by the prefill scheduler.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """Add a launched step with at least one request."""
        self._steps.append(step)

    def complete(self) -> Step:
        """Remove and return the oldest step, whose results have arrived."""
        return self._steps.popleft()

    def abandon(self) -> list[PrefillRequest]:
        """Remove all steps, because none of them will complete, and return their requests."""
        left = {request: None for step in self._steps for request, _ in step}
        self._steps.clear()
        for request in left:
            request.in_flight = 0
        return list(left)


_ARRIVAL = attrgetter("arrival")
_REMAINING = attrgetter("remaining")
