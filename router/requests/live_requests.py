"""All requests that have not ended, by internal id and by client id; some are held until their prompt is cached."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from router.observability.request_outcome import JointOutcome
from router.placement.worker_state import Clock
from router.requests.answer import Answer
from router.requests.choices import choice_of
from router.requests.request import Admitted, RoutedRequest
from router.text.answer_text import AnswerText, TokenText


class LiveRequests(Mapping[str, RoutedRequest]):
    """A mapping from internal ids to requests; a client's request for n answers is n requests here.

    The dispatcher owns it; all calls are on the event loop.
    """

    def __init__(self, tokens: TokenText, clock: Clock) -> None:
        """`tokens` turns the token ids of answers into text."""
        self._tokens, self._clock = tokens, clock
        self._by_internal_id: dict[str, RoutedRequest] = {}
        self._by_client_id: dict[tuple[str, str], list[RoutedRequest]] = {}
        """Requests by tenant and client id; the tenant is part of the key, because two tenants may use the same id."""
        self._emptied = asyncio.Event()
        self.arrivals = 0
        """Number of requests made since the start, accepted or not."""
        self.held = 0
        """Number of requests that are held until the first answer to their prompt is admitted by its decode worker."""
        self._held_of: Counter[str] = Counter()
        """The number of held requests, by tenant."""

    def current(self, internal_id: str, attempt: int) -> RoutedRequest | None:
        """Return the request whose current attempt this is, placed on workers; None if it has ended."""
        request = self._by_internal_id.get(internal_id)
        placed = request is not None and request.attempt == attempt and request.prefill is not None
        return request if placed else None

    def __getitem__(self, internal_id: str) -> RoutedRequest:
        return self._by_internal_id[internal_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_internal_id)

    def __len__(self) -> int:
        return len(self._by_internal_id)

    def of_client(self, tenant: str, request_id: str) -> Sequence[RoutedRequest]:
        """Return all answers to a client's request, including ended ones; () once all have ended."""
        return self._by_client_id.get((tenant, request_id), ())

    def held_of(self, tenant: str) -> int:
        """Return the number of held requests of this tenant."""
        return self._held_of[tenant]

    def make(self, admitted: Admitted, joint: JointOutcome) -> list[RoutedRequest]:
        """Return one new request for each answer to a prompt, in order; the caller must pass them to `add`.

        `joint` collects the SLO outcome of the client's request, which may have further prompts.
        """
        return [self._make(choice_of(admitted, index), joint) for index in range(admitted.n)]

    def add(self, requests: Sequence[RoutedRequest]) -> None:
        """Add the requests for all answers to one prompt; all but the first are held until the prompt is cached.

        See `router/requests/choices.py`.
        """
        first, *others = requests
        first.held = tuple(others)
        if others:
            self.held += len(others)
            self._held_of[first.admitted.tenant] += len(others)
        self._by_internal_id |= {request.internal_id: request for request in requests}
        self._by_client_id.setdefault(_name(first), []).extend(requests)

    def release_held(self, request: RoutedRequest) -> list[RoutedRequest]:
        """End the hold of the other answers to the prompt of `request`, and return those that have not ended."""
        held, request.held = request.held, ()
        if held:
            self.held -= len(held)
            tenant = request.admitted.tenant
            self._held_of[tenant] -= len(held)
            if not self._held_of[tenant]:
                del self._held_of[tenant]
        return [answer for answer in held if not answer.ended]

    def remove(self, request: RoutedRequest) -> None:
        """Remove a request that has ended."""
        del self._by_internal_id[request.internal_id]
        if all(answer.ended for answer in self._by_client_id[_name(request)]):
            del self._by_client_id[_name(request)]
        if not self:
            self._emptied.set()

    async def until_empty(self) -> None:
        """Wait until the last request has ended; the caller must ensure that no requests are added meanwhile."""
        if self:
            self._emptied.clear()
            await self._emptied.wait()

    def _make(self, admitted: Admitted, joint: JointOutcome) -> RoutedRequest:
        self.arrivals += 1
        now, internal_id = self._clock(), f"{admitted.request_id}~{uuid.uuid4().hex[:12]}"
        return RoutedRequest(
            internal_id=internal_id,
            admitted=admitted,
            queued=admitted.queued(internal_id, self.arrivals, now - admitted.waited_s),
            text=AnswerText(
                self._tokens,
                admitted.stop,
                include_stop=admitted.include_stop,
                min_tokens=admitted.sampling.min_tokens,
                kept={} if admitted.syntax is None else admitted.syntax.kept,
            ),
            answer=Answer(admitted.request_id),
            waiting_since=now,
            event_times=list(admitted.event_times),
            joint=joint,
        )


def _name(request: RoutedRequest) -> tuple[str, str]:
    return request.admitted.tenant, request.admitted.request_id
