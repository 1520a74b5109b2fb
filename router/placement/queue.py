"""The queue of requests that wait for workers: fair between tenants, by priority and slack within each.

Retried and preempted requests go first: their client reads already, and has been charged for them. Those that gave
their slot to another tenant wait among their tenant's. Then the tenant that
was given the fewest tokens is next (virtual token counters: Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024); one that comes, or comes back, begins level with those that wait. A tenant's requests are ordered by
priority, lower first as in vLLM, then by the time at which their prompt must start to meet the target.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from tandem.settings.slo import BEST_EFFORT, SloClass


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """The sizes and targets of a request that waits for workers. Seconds are those of the router's clock."""

    wire_id: str
    """Its name among workers, used once."""
    sequence: int
    """The order of arrival."""
    arrived_s: float
    """The time at which it was received."""
    prompt_tokens: int
    max_tokens: int
    to_the_limit: bool = False
    """True if nothing but `max_tokens` ends the answer, as far as is known."""
    digests: tuple[bytes, ...] = ()
    """The names of the prompt's full pages (`tandem.protocol.page_digests`); () = unknown."""
    tenant: str = ""
    priority: int = 0
    """Lower goes first, among its tenant's."""
    slo: SloClass = BEST_EFFORT
    """The class it is served under: the requested one, or best effort if that could not be kept."""
    answered: int = 0
    """Answer tokens that an earlier attempt generated; they are prefilled behind the prompt."""
    resumed: bool = False
    """True for a retried or preempted request whose client has received tokens: it goes first."""
    yielded: bool = False
    """True for a resumed request whose slot another tenant needs: it does not go first."""
    expected_tokens: int | None = None
    """The forecast of the answer's length, which one answer in five exceeds; None = `max_tokens`."""
    mean_tokens: float = 0.0
    """The mean length of such answers."""
    start_by_s: float = 0.0
    """The latest start of its prefill that meets the target; constant while it is queued."""
    service_s: float = 0.0
    """The predicted seconds to compute its prompt."""
    charged: int = 0
    """The prompt tokens that its tenant was charged for."""
    charged_answer: int = 0
    """The answer tokens that its tenant was charged for."""

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


def _key(request: QueuedRequest) -> tuple[int, float, int]:
    return request.priority, request.start_by_s, request.sequence


class RequestQueue:
    """Its caller bounds the number of requests. `head` looks at every waiting tenant."""

    def __init__(self) -> None:
        self._waiting: dict[str, QueuedRequest] = {}
        self._tenants: dict[str, list[QueuedRequest]] = {}
        """The waiting requests by tenant, sorted, without those of the next two dictionaries."""
        self._resumed: dict[str, QueuedRequest] = {}
        """Requests that go first."""
        self._skipped: dict[str, QueuedRequest] = {}
        """Requests that no worker can serve until the fleet changes."""
        self._given: dict[str, float] = {}
        """The tokens of each tenant that waits or is above the level."""
        self._level = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate over the waiting requests, in no order."""
        return iter(list(self._waiting.values()))

    def count_of(self, tenant: str) -> int:
        """Return the number of waiting requests of `tenant`, without resumed ones."""
        return len(self._tenants.get(tenant, ())) + sum(each.tenant == tenant for each in self._skipped.values())

    def ahead(self, request: QueuedRequest) -> tuple[float, int]:
        """Estimate the work before a request that is about to be queued: seconds of prefill, and answers.

        It is at most all that is more urgent, and at most its tenant's own times the number of tenants. Answers of
        resumed requests count as well.
        """
        own = [each for each in self._tenants.get(request.tenant, ()) if _key(each) < _key(request)]
        turns, waiting = len({*self._tenants, request.tenant}), chain.from_iterable(self._tenants.values())
        others = (each for each in waiting if each.tenant != request.tenant)
        earlier = [*own, *(each for each in others if each.start_by_s <= request.start_by_s)]
        seconds, own_s = (sum(each.service_s for each in requests) for requests in (earlier, own))
        answers, own_answers = (sum(each.decodes for each in requests) for requests in (earlier, own))
        return min(seconds, own_s * turns), len(self._resumed) + min(answers, own_answers * turns)

    def push(self, request: QueuedRequest) -> None:
        """Add `request`; one that comes back has its old position."""
        self._waiting[request.wire_id] = request
        if request.resumed and not request.yielded:
            self._resumed[request.wire_id] = request
            return
        if request.tenant not in self._tenants:
            level = min((self._given[tenant] for tenant in self._tenants), default=self._level)
            self._given[request.tenant] = max(self._given.get(request.tenant, 0.0), level)
            self._tenants[request.tenant] = []
        insort(self._tenants[request.tenant], request, key=_key)

    def head(self, passed: Collection[str] = ()) -> QueuedRequest | None:
        """Return the next request, which stays in the queue, without those of the tenants in `passed`."""
        if self._resumed:
            return min(self._resumed.values(), key=lambda request: request.sequence)
        heads = [waiting[0] for tenant, waiting in self._tenants.items() if tenant not in passed]
        return min(heads, key=lambda each: (self._given[each.tenant], each.start_by_s, each.sequence), default=None)

    def remove(self, request: QueuedRequest) -> None:
        """Remove `request`; nothing happens if it does not wait."""
        if self._waiting.pop(request.wire_id, None) is None:
            return
        if any(some.pop(request.wire_id, None) is not None for some in (self._resumed, self._skipped)):
            return
        mine = self._tenants[request.tenant]
        del mine[bisect_left(mine, _key(request), key=_key)]
        if not mine:
            del self._tenants[request.tenant]
            lowest = min((self._given[each] for each in self._tenants), default=self._given[request.tenant])
            self._level = level = max(self._level, lowest)
            self._given = {
                name: tokens for name, tokens in self._given.items() if tokens > level or name in self._tenants
            }

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
        self._given[tenant] = max(self._given.get(tenant, 0.0), self._level) + tokens
