"""Requests that wait for a worker: fair between tenants, by priority and slack within each.

A tenant's requests are ordered by their priority, lower first as in vLLM, then by slack: the one that must start
soonest goes first, which is its deadline for the first token less the time that computing its prompt takes. Priorities
order a tenant's own requests alone: nobody gets ahead of others by calling himself urgent.

Who was served already and has lost a worker, or gave way to an older request there, goes first of all: its client
reads, and has been charged for it.

Between tenants counts how much work each of them has been given, in tokens (after Sheng et al., Fairness in Serving
Large Language Models, OSDI 2024: virtual token counters). Among those who are less than `burst_tokens` ahead of the
one that has been given least, the request that must start soonest goes first; so slack decides as long as all get
their share, and nobody ever gets more than that many tokens ahead. A tenant who comes, or comes back, begins level with
those that wait: what was not asked for is not saved up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from router.placement.queued_request import QueuedRequest

BURST_TOKENS = 8192
_REMEMBERED = 1024
"""Accounts of tenants without requests that are kept before those that no longer matter are dropped."""
_BUCKET_S = 0.05
"""Resolution of what is summed by start times."""


class Ahead(NamedTuple):
    """Work that comes before something else."""

    seconds: float = 0.0
    answers: int = 0
    """That begin with it."""


@dataclass(slots=True)
class _Bucket:
    parts: int = 0
    seconds: float = 0.0
    answers: int = 0


class Backlog:
    """Waiting work summed by start time, in buckets: how much is more urgent is known without looking at requests."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def add(self, start_by_s: float, seconds: float, answers: int = 0) -> None:
        """Work of `seconds` must start by then, and so many answers follow it."""
        bucket = self._buckets.setdefault(int(start_by_s / _BUCKET_S), _Bucket())
        bucket.parts += 1
        bucket.seconds += seconds
        bucket.answers += answers

    def remove(self, start_by_s: float, seconds: float, answers: int = 0) -> None:
        """It was added like this and waits no more."""
        place = int(start_by_s / _BUCKET_S)
        bucket = self._buckets[place]
        bucket.parts -= 1
        bucket.seconds -= seconds
        bucket.answers -= answers
        if not bucket.parts:  # no rest of a rounding stays
            del self._buckets[place]

    def before(self, start_by_s: float) -> Ahead:
        """All work that must start no later, to a bucket."""
        last = int(start_by_s / _BUCKET_S)
        earlier = [bucket for place, bucket in self._buckets.items() if place <= last]
        return Ahead(sum(each.seconds for each in earlier), sum(each.answers for each in earlier))


_Entry = tuple[int, float, int, str]


def _entry(request: QueuedRequest) -> _Entry:
    return request.priority, request.start_by_s, request.sequence, request.wire_id


class _Line:
    """One tenant's requests."""

    def __init__(self, given: float) -> None:
        self.given = given
        self.heap: list[_Entry] = []
        self.count = 0
        self.backlog = Backlog()


class RequestQueue:
    """Bounded, in all and for each tenant; members may leave from the middle. `head` looks at every waiting tenant."""

    def __init__(self, limit: int, tenant_limit: int | None = None, burst_tokens: int = BURST_TOKENS) -> None:
        """`tenant_limit` is the most that one tenant may have waiting, None = as many as all."""
        self._limit = limit
        self._tenant_limit = limit if tenant_limit is None else tenant_limit
        self._burst = burst_tokens
        self._lines: dict[str, _Line] = {}
        self._waiting: dict[str, QueuedRequest] = {}
        self._resumed: dict[str, QueuedRequest] = {}
        """Those of them that go first; they stand in no line."""
        self._aside: dict[str, QueuedRequest] = {}
        """Those that stand in no line either, and have no turn."""
        self._given: dict[str, float] = {}
        self._remembered_max = _REMEMBERED
        self._level = 0.0
        self.backlog = Backlog()
        """All that waits."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The waiting requests, in no order."""
        return iter(list(self._waiting.values()))

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._limit

    @property
    def tenants(self) -> int:
        """How many have something waiting."""
        return len(self._lines)

    def full_with(self, others: int) -> bool:
        """Whether it is full with so many others."""
        return len(self._waiting) + others >= self._limit

    def full_for(self, tenant: str, others: int = 0) -> bool:
        """Whether `tenant` has as much waiting as one may, `others` of its own counted in."""
        line = self._lines.get(tenant)
        aside = sum(request.tenant == tenant for request in self._aside.values())
        return (line.count if line is not None else 0) + aside + others >= self._tenant_limit

    def ahead(self, tenant: str, start_by_s: float) -> Ahead:
        """Prompts that would be computed before one of `tenant` that must start by then, about: no more than what is
        more urgent, and than what it and as many others get in turn. Of answers, those that were resumed as well.
        """
        line = self._lines.get(tenant)
        all_, own = self.backlog.before(start_by_s), Ahead() if line is None else line.backlog.before(start_by_s)
        turns = self.tenants + (line is None)
        answers = len(self._resumed) + min(all_.answers, own.answers * turns)
        return Ahead(min(all_.seconds, own.seconds * turns), answers)

    def push(self, request: QueuedRequest) -> None:
        """Add `request`; one that comes back keeps its place. Whether there is room is the caller's question."""
        if request.resumed:
            self._waiting[request.wire_id] = self._resumed[request.wire_id] = request
            return
        tenant = request.tenant
        line = self._lines.get(tenant)
        if line is None:
            level = min((each.given for each in self._lines.values()), default=self._level)
            line = self._lines[tenant] = _Line(max(self._given.pop(tenant, 0.0), level))
        self._waiting[request.wire_id] = request
        line.count += 1
        heapq.heappush(line.heap, _entry(request))
        for backlog in (line.backlog, self.backlog):
            backlog.add(request.start_by_s, request.service_s, request.decodes)

    def head(self) -> QueuedRequest | None:
        """The request whose turn it is; it stays."""
        if self._resumed:
            return min(self._resumed.values(), key=lambda request: request.sequence)
        lines = self._lines.values()
        if not lines:
            return None
        least = min(line.given for line in lines)
        heads = [self._head_of(line) for line in lines if line.given <= least + self._burst]
        return min(heads, key=lambda request: (request.start_by_s, request.sequence))

    def remove(self, request: QueuedRequest) -> None:
        """Take `request` out, wherever it stands; nothing if it does not wait."""
        if self._waiting.pop(request.wire_id, None) is None:
            return
        if any(some.pop(request.wire_id, None) is not None for some in (self._resumed, self._aside)):
            return
        line = self._lines[request.tenant]
        line.count -= 1
        for backlog in (line.backlog, self.backlog):
            backlog.remove(request.start_by_s, request.service_s, request.decodes)
        if not line.count:
            self._leave(request.tenant, line)
        # Entries of those that left stay in the heap until they surface; a rebuild bounds their number.
        elif len(line.heap) > 2 * line.count + 64:
            line.heap = [entry for entry in line.heap if self._counts(entry)]
            heapq.heapify(line.heap)

    def set_aside(self, request: QueuedRequest) -> None:
        """It waits on without a turn, until `bring_back`."""
        self.remove(request)
        self._waiting[request.wire_id] = self._aside[request.wire_id] = request

    def bring_back(self) -> None:
        """All that were set aside have their places again."""
        aside, self._aside = self._aside, {}
        for request in aside.values():
            self.push(request)

    def charge(self, tenant: str, tokens: float) -> None:
        """`tenant` was given so much work."""
        line = self._lines.get(tenant)
        if line is not None:
            line.given += tokens
        else:
            self._given[tenant] = max(self._given.get(tenant, 0.0), self._level) + tokens
            self._forget_old()

    def _head_of(self, line: _Line) -> QueuedRequest:
        while not self._counts(line.heap[0]):
            heapq.heappop(line.heap)
        return self._waiting[line.heap[0][3]]

    def _counts(self, entry: _Entry) -> bool:
        """Whether an entry stands for a waiting request, and for its place: one that came back may have another."""
        wire_id = entry[3]
        request = self._waiting.get(wire_id)
        if request is None or wire_id in self._resumed or wire_id in self._aside:
            return False
        return entry == _entry(request)

    def _leave(self, tenant: str, line: _Line) -> None:
        """Nothing of `tenant` waits: what it was given is remembered while others are behind it."""
        del self._lines[tenant]
        self._level = max(self._level, min((each.given for each in self._lines.values()), default=line.given))
        self._given[tenant] = line.given
        self._forget_old()

    def _forget_old(self) -> None:
        if len(self._given) > self._remembered_max:
            self._given = {name: given for name, given in self._given.items() if given > self._level}
            self._remembered_max = max(_REMEMBERED, 2 * len(self._given))
