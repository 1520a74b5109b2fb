"""The queue of requests that wait for workers: fair between tenants, by priority and slack within each.

Retried and preempted requests go first: their client reads already, and has been charged for them.

A tenant's requests are ordered by priority, lower first as in vLLM, then by the time at which their prompt must start
to meet the target. Priorities order the requests of one tenant only.

Tenants are charged for the tokens they are given (virtual token counters: Sheng et al., Fairness in Serving Large
Language Models, OSDI 2024). Among the tenants within `burst_tokens` of the one that was given least, the request that
must start soonest goes first. A tenant that comes, or comes back, begins level with those that wait.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from router.slo import BEST_EFFORT, SloClass

BURST_TOKENS = 8192


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """The sizes and targets of a request that waits for workers. Seconds are those of the router's clock."""

    wire_id: str
    """Its name among workers, used once."""
    sequence: int
    """The order of arrival."""
    arrived_s: float
    prompt_tokens: int
    max_tokens: int
    to_the_limit: bool = False
    """True if nothing but `max_tokens` ends the answer, as far as is known."""
    digests: tuple[bytes, ...] = ()
    """The names of the prompt's full pages (`wire.page_digests`); () = unknown."""
    tenant: str = ""
    priority: int = 0
    """Lower goes first, among the requests of its tenant."""
    slo: SloClass = BEST_EFFORT
    """The class it is served under: the requested one, or best effort if that could not be kept."""
    answered: int = 0
    """Answer tokens that an earlier attempt generated; they are prefilled behind the prompt."""
    resumed: bool = False
    """True for a retried or preempted request whose client has received tokens: it goes first."""
    expected_tokens: int | None = None
    """The forecast of the answer's length, rarely exceeded; None = `max_tokens`."""
    mean_tokens: float = 0.0
    """The mean length of such answers."""
    start_by_s: float = 0.0
    """The latest start of its prefill that meets the target; constant while it is queued."""
    service_s: float = 0.0
    """The predicted seconds to compute its prompt."""
    charged: int = 0
    """Prompt tokens that its tenant was charged for."""

    @property
    def prefill_tokens(self) -> int:
        """The tokens that this attempt prefills."""
        return self.prompt_tokens + self.answered

    @property
    def decodes(self) -> bool:
        """True if tokens follow the one that prefill generates."""
        return self.max_tokens > self.answered + 1

    @property
    def kv_tokens(self) -> int:
        """The most KV that it ever stores, in tokens."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def reserved_tokens(self) -> int:
        """The KV that a decode worker must have free when it begins, in tokens: that of the expected answer."""
        if self.expected_tokens is None:
            return self.kv_tokens
        return max(self.prefill_tokens, self.prompt_tokens + self.expected_tokens - 1)

    @property
    def decode_context(self) -> int:
        """The tokens that a decode step of it attends to, on average over the answer."""
        return self.prefill_tokens + int(self.mean_tokens) // 2


class Ahead(NamedTuple):
    """The work before a request: seconds of prefill, and answers that begin with it."""

    seconds: float = 0.0
    answers: int = 0


_Entry = tuple[int, float, int, QueuedRequest]


def _key(request: QueuedRequest) -> tuple[int, float, int]:
    return request.priority, request.start_by_s, request.sequence


@dataclass(slots=True)
class TenantQueue:
    """The requests of one tenant, sorted, and the tokens it was given."""

    given: float
    entries: list[_Entry] = field(default_factory=list)

    def before(self, start_by_s: float) -> Ahead:
        """Return the work that must start by then."""
        earlier = [request for *_, request in self.entries if request.start_by_s <= start_by_s]
        return Ahead(sum(each.service_s for each in earlier), sum(each.decodes for each in earlier))


class RequestQueue:
    """Bounded, in all and for each tenant. `head` looks at every waiting tenant."""

    def __init__(self, limit: int, tenant_limit: int | None = None, burst_tokens: int = BURST_TOKENS) -> None:
        """`tenant_limit` is the most requests of one tenant, None = `limit`."""
        self._limit = limit
        self._tenant_limit = limit if tenant_limit is None else tenant_limit
        self._burst = burst_tokens
        self._tenants: dict[str, TenantQueue] = {}
        self._waiting: dict[str, QueuedRequest] = {}
        self._resumed: dict[str, QueuedRequest] = {}
        """Waiting requests that go first; they are in no tenant's queue."""
        self._skipped: dict[str, QueuedRequest] = {}
        """Waiting requests that no worker can serve; they are in no tenant's queue until the fleet changes."""
        self._given: dict[str, float] = {}
        """The tokens of tenants without waiting requests that are above the level."""
        self._level = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate over the waiting requests, in no order."""
        return iter(list(self._waiting.values()))

    def full_with(self, others: int = 0) -> bool:
        """Return True if no request fits in after `others`."""
        return len(self._waiting) + others >= self._limit

    def full_for(self, tenant: str, others: int = 0) -> bool:
        """Return True if no request of `tenant` fits in after `others` of its own."""
        mine = self._tenants.get(tenant)
        skipped = sum(request.tenant == tenant for request in self._skipped.values())
        return (len(mine.entries) if mine is not None else 0) + skipped + others >= self._tenant_limit

    def ahead(self, tenant: str, start_by_s: float) -> Ahead:
        """Estimate the work before a request of `tenant` that must start by then.

        It is at most all that is more urgent, and at most its tenant's own times the number of tenants. Answers of
        resumed requests count as well.
        """
        mine = self._tenants.get(tenant)
        turns = len(self._tenants) + (mine is None)
        everyone = [each.before(start_by_s) for each in self._tenants.values()]
        own = Ahead() if mine is None else mine.before(start_by_s)
        answers = min(sum(each.answers for each in everyone), own.answers * turns)
        return Ahead(min(sum(each.seconds for each in everyone), own.seconds * turns), len(self._resumed) + answers)

    def push(self, request: QueuedRequest) -> None:
        """Add `request`; one that comes back has its old position. The caller checks the limits."""
        self._waiting[request.wire_id] = request
        if request.resumed:
            self._resumed[request.wire_id] = request
            return
        mine = self._tenants.get(request.tenant)
        if mine is None:
            level = min((each.given for each in self._tenants.values()), default=self._level)
            mine = self._tenants[request.tenant] = TenantQueue(max(self._given.pop(request.tenant, 0.0), level))
        insort(mine.entries, (*_key(request), request))

    def head(self) -> QueuedRequest | None:
        """Return the next request; it stays in the queue."""
        if self._resumed:
            return min(self._resumed.values(), key=lambda request: request.sequence)
        if not self._tenants:
            return None
        least = min(each.given for each in self._tenants.values())
        heads = [each.entries[0][3] for each in self._tenants.values() if each.given <= least + self._burst]
        return min(heads, key=lambda request: (request.start_by_s, request.sequence))

    def remove(self, request: QueuedRequest) -> None:
        """Remove `request`; nothing happens if it does not wait."""
        if self._waiting.pop(request.wire_id, None) is None:
            return
        if any(some.pop(request.wire_id, None) is not None for some in (self._resumed, self._skipped)):
            return
        mine = self._tenants[request.tenant]
        del mine.entries[bisect_left(mine.entries, _key(request))]
        if not mine.entries:
            del self._tenants[request.tenant]
            self._level = max(self._level, min((each.given for each in self._tenants.values()), default=mine.given))
            self._given = {name: given for name, given in self._given.items() if given > self._level}
            self._given[request.tenant] = mine.given

    def skip(self, request: QueuedRequest) -> None:
        """Let others pass `request`, which waits on, until `restore_skipped`."""
        self.remove(request)
        self._waiting[request.wire_id] = self._skipped[request.wire_id] = request

    def restore_skipped(self) -> None:
        """Queue all skipped requests again, at their old positions."""
        skipped, self._skipped = self._skipped, {}
        for request in skipped.values():
            self.push(request)

    def charge(self, tenant: str, tokens: float) -> None:
        """Count `tokens` that `tenant` was given."""
        mine = self._tenants.get(tenant)
        if mine is not None:
            mine.given += tokens
        else:
            self._given[tenant] = max(self._given.get(tenant, 0.0), self._level) + tokens
