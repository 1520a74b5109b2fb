"""The queue of requests that wait for workers: fair between tenants, ordered by priority and slack within each tenant.

Retried and preempted requests go first, because their clients are already reading an answer and their tenants have been
charged. An exception is an answer that was preempted for another tenant: it waits among the requests of its own tenant.
Of the other requests, those of the tenant that has been served the fewest tokens are next (virtual token counters:
Sheng et al., Fairness in Serving Large Language Models, OSDI 2024); the counter of a new or returning tenant starts at
the lowest counter of the waiting tenants. The requests of a tenant are ordered by priority, lower first as in vLLM,
then by the time at which their prefill must start to meet the TTFT target.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from tandem.settings.slo import BEST_EFFORT, SloClass


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """The sizes and targets of a request that waits for workers. Times are in seconds of the router's clock.

    The `RoutedRequest` owns it; queue, scheduler and placement read and write it on the event loop.
    """

    internal_id: str
    """The request's unique id on workers."""
    sequence: int
    """The request's position in the order of arrival."""
    arrived_s: float
    """The time at which the router received the request, in seconds."""
    prompt_tokens: int
    max_tokens: int
    to_the_limit: bool = False
    """True if the router expects the answer to end only at `max_tokens`."""
    digests: tuple[bytes, ...] = ()
    """The digests of the prompt's full pages (`tandem.protocol.page_digests`); () if they are unknown."""
    tenant: str = ""
    priority: int = 0
    """The client's priority: among the requests of one tenant, lower values go first."""
    slo: SloClass = BEST_EFFORT
    """The SLO class under which the request is served: the requested class, or best effort after a downgrade."""
    prior_output_tokens: int = 0
    """Number of answer tokens from earlier attempts; this attempt prefills them after the prompt."""
    resumed: bool = False
    """True if the request was retried or preempted and its answer has tokens: it goes before new requests."""
    yielded: bool = False
    """True if the request was preempted because another tenant needs its slot: it does not go before new requests."""
    expected_tokens: int | None = None
    """The forecast of the answer's length in tokens, which one in five answers exceeds; None means `max_tokens`."""
    mean_tokens: float = 0.0
    """The mean length of similar answers, in tokens."""
    start_by_s: float = 0.0
    """The latest start of prefill, in seconds, as `AdmissionController.schedule` computes it.

    A later start misses the TTFT target, if that is shorter than the deferral. The queue is sorted by this
    time, so it must not change while the request is in the queue.
    """
    service_s: float = 0.0
    """The predicted time to compute the prompt, in seconds."""
    charged: int = 0
    """Number of prompt tokens that the tenant has been charged for this request."""
    charged_answer: int = 0
    """Number of answer tokens that the tenant has been charged for this request."""

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens that this attempt prefills: the prompt and the answer tokens of earlier attempts."""
        return self.prompt_tokens + self.prior_output_tokens

    def readable_digests(self, page_tokens: int) -> tuple[bytes, ...]:
        """Return the digests of the pages that may be read instead of computed, on workers with pages of this size.

        The page of the last token is always computed.
        """
        return self.digests[: (self.prefill_tokens - 1) // page_tokens]

    @property
    def decodes(self) -> bool:
        """True if this attempt needs a decode worker: the answer may have more tokens than the one of prefill."""
        return self.max_tokens > self.prior_output_tokens + 1

    @property
    def kv_tokens(self) -> int:
        """Maximum number of tokens whose KV the request stores; the KV of the last answer token is never stored."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def reserved_tokens(self) -> int:
        """Number of tokens for whose KV a decode worker must have free pages: prompt and expected answer."""
        if self.expected_tokens is None:
            return self.kv_tokens
        return max(self.prefill_tokens, self.prompt_tokens + self.expected_tokens - 1)

    @property
    def decode_context(self) -> int:
        """Expected number of context tokens of the request in a decode step, averaged over its answer."""
        return self.prefill_tokens + int(self.mean_tokens) // 2


def _key(request: QueuedRequest) -> tuple[int, float, int]:
    return request.priority, request.start_by_s, request.sequence


class RequestQueue:
    """The waiting requests of all tenants. The `RequestScheduler` owns it and limits the number of requests.

    All calls come on the event loop. `head` takes time proportional to the number of waiting tenants.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, QueuedRequest] = {}
        self._tenants: dict[str, list[QueuedRequest]] = {}
        """The waiting requests of each tenant, sorted, without the requests in `_resumed` and `_skipped`."""
        self._resumed: dict[str, QueuedRequest] = {}
        """Resumed requests, which go before all others, by internal id."""
        self._skipped: dict[str, QueuedRequest] = {}
        """Requests that no worker can serve until the fleet changes, by internal id."""
        self._given: dict[str, float] = {}
        """The virtual token counter of each tenant that has waiting requests or whose counter is above `_level`."""
        self._level = 0.0
        """The counter value with which a new or returning tenant starts if no other tenant has waiting requests."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate over all waiting requests, unsorted."""
        return iter(list(self._waiting.values()))

    def count_of(self, tenant: str) -> int:
        """Return the number of waiting requests of `tenant`, not counting resumed ones."""
        return len(self._tenants.get(tenant, ())) + sum(request.tenant == tenant for request in self._skipped.values())

    def ahead(self, request: QueuedRequest) -> tuple[float, int]:
        """Estimate the work served before `request` if it were queued now: seconds of prefill, and number of answers.

        Each of the two is the smaller of two bounds:

        - the work of the requests of the same tenant that are before `request` in the queue, plus that of the requests
          of other tenants whose `start_by_s` is not later
        - the work of the requests of the same tenant that are before `request`, times the number of tenants, because
          tenants take turns

        An answer counts only if it needs a decode worker. Resumed requests go first, so each of them counts as one more
        answer; their prefill is not counted. Skipped requests are not counted.
        """
        own = [queued for queued in self._tenants.get(request.tenant, ()) if _key(queued) < _key(request)]
        turns, waiting = len({*self._tenants, request.tenant}), chain.from_iterable(self._tenants.values())
        others = (queued for queued in waiting if queued.tenant != request.tenant)
        earlier = [*own, *(queued for queued in others if queued.start_by_s <= request.start_by_s)]
        seconds, own_s = (sum(queued.service_s for queued in requests) for requests in (earlier, own))
        answers, own_answers = (sum(queued.decodes for queued in requests) for requests in (earlier, own))
        return min(seconds, own_s * turns), len(self._resumed) + min(answers, own_answers * turns)

    def push(self, request: QueuedRequest) -> None:
        """Add `request`; a request that was in the queue before gets its old position again."""
        self._waiting[request.internal_id] = request
        if request.resumed and not request.yielded:
            self._resumed[request.internal_id] = request
            return
        # A tenant that was absent must not have saved up credit: its counter is raised to the lowest waiting one.
        if request.tenant not in self._tenants:
            level = min((self._given[tenant] for tenant in self._tenants), default=self._level)
            self._given[request.tenant] = max(self._given.get(request.tenant, 0.0), level)
            self._tenants[request.tenant] = []
        insort(self._tenants[request.tenant], request, key=_key)

    def head(self, passed: Collection[str] = ()) -> QueuedRequest | None:
        """Return the next request without removing it; new requests of the tenants in `passed` are passed over."""
        if self._resumed:
            return min(self._resumed.values(), key=lambda request: request.sequence)
        heads = [waiting[0] for tenant, waiting in self._tenants.items() if tenant not in passed]
        return min(
            heads, key=lambda request: (self._given[request.tenant], request.start_by_s, request.sequence), default=None
        )

    def remove(self, request: QueuedRequest) -> None:
        """Remove `request`; does nothing if it is not in the queue."""
        if self._waiting.pop(request.internal_id, None) is None:
            return
        if any(some.pop(request.internal_id, None) is not None for some in (self._resumed, self._skipped)):
            return
        waiting = self._tenants[request.tenant]
        del waiting[bisect_left(waiting, _key(request), key=_key)]
        # The level follows the lowest waiting counter, and counters at or below it are forgotten: a tenant that returns
        # would start at the level anyway.
        if not waiting:
            del self._tenants[request.tenant]
            lowest = min((self._given[tenant] for tenant in self._tenants), default=self._given[request.tenant])
            self._level = level = max(self._level, lowest)
            self._given = {
                name: tokens for name, tokens in self._given.items() if tokens > level or name in self._tenants
            }

    def skip(self, request: QueuedRequest) -> None:
        """Keep `request` in the queue, but never return it from `head` until `restore_skipped` is called."""
        self.remove(request)
        self._waiting[request.internal_id] = self._skipped[request.internal_id] = request

    def restore_skipped(self) -> None:
        """Put all skipped requests back into their old positions in the queue."""
        skipped, self._skipped = self._skipped, {}
        for request in skipped.values():
            self.push(request)

    def charge(self, tenant: str, tokens: float) -> None:
        """Add `tokens` to the virtual token counter of `tenant`, which has been served these tokens."""
        self._given[tenant] = max(self._given.get(tenant, 0.0), self._level) + tokens
