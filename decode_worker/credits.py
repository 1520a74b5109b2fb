"""Pages that requests may count on: what each claims, and what the pool keeps back for all of them together.

A request claims what its prompt and its answer are expected to fill. The pool's promise backs the claims of all: an
answer that outgrows its forecast takes what others have not used yet, and only when nothing is left of that must one
of them give way. Prompts on their way are different: their pages were promised to somebody who is going to write them,
so so many of the backed pages are nobody else's.
"""

from collections.abc import Sequence

from decode_worker.request import DecodeRequest
from engine.cache.prefix_cache import Prefix, PrefixCache
from wire.errors import ResourceExhausted


class Credits:
    """Guarded by the admission's lock."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._limit: int | None = None
        self.committed = 0
        """Pages that the requests hold and claim."""
        self._claims = 0
        """Those of them that were not taken from the pool yet."""
        self._backed = 0
        """The pool's promise: at most the claims, less only where answers have outgrown their forecasts."""
        self._prompts = 0
        """The part of it that is for prompts."""
        self._held = 0
        """Pages of the requests, those that are for prompts counted in."""

    def limit(self, limit: int | None) -> None:
        """On pages claimed or held, each counted for every request that reads it; None, as at first, = the pool alone
        is the limit, and shared pages count once. What is claimed stays so.
        """
        self._limit = limit

    @property
    def left(self) -> int:
        """Pages that the requests may hold beside those that they do, if the pool has them."""
        return max(0, (self._pool.total if self._limit is None else self._limit) - self._held)

    def enter(self, prefix: Prefix, pages: int, prompt_pages: int, prompt_tokens: int, aside: int) -> int:
        """A new claim of `pages`, less those of the prefix that are cached, which are read from now on. Returns how
        many it is; `aside` pages must be left then. ResourceExhausted: nothing has changed.
        """
        self._balance()
        short = self._backed < self._claims
        if short or (self._limit is not None and self.committed + pages + aside > self._limit):
            raise ResourceExhausted("answers have outgrown their forecasts; come back later")
        promised = self._cache.promise(prefix, pages, prompt_tokens, aside=aside)
        self.committed += pages
        self._claims += promised
        self._backed += promised
        self._prompts += prompt_pages - len(prefix.pages)
        self._held += prompt_pages
        return promised

    def spend_on_prompt(self, request: DecodeRequest, pages: int) -> None:
        """So many promised pages have become the lease's."""
        request.promised -= pages
        self._claims -= pages
        self._backed -= pages
        self._prompts -= pages

    def extend(self, request: DecodeRequest, pages: int) -> None:
        """It is expected to fill `pages` pages after all, whether there are any or not."""
        more = pages - request.committed
        request.committed += more
        request.promised += more
        self.committed += more
        self._claims += more

    def grow(self, request: DecodeRequest, *, beyond_limit: bool = False) -> bool:
        """One more page for a request with a claim; False if there is none."""
        self._balance()
        if self._limit is not None and self._held >= self._limit:
            if not beyond_limit:
                return False
            self._backed += self._pool.promise_up_to(1)
        if self._backed <= self._prompts:
            return False
        request.pages += self._pool.allocate(request.reservation.ref, 1, from_promise=True)
        request.promised -= 1
        self._claims -= 1
        self._backed -= 1
        self._held += 1
        return True

    def grow_all(self, requests: Sequence[DecodeRequest]) -> bool:
        """As `grow` for one after the other, if that gives each of them its page; else False, and none has one."""
        self._balance()
        pages = len(requests)
        if self._limit is not None and self._held + pages > self._limit:
            return False
        if self._backed - pages < self._prompts:
            return False
        taken = self._pool.allocate_each([request.reservation.ref for request in requests])
        for request, page in zip(requests, taken, strict=True):
            request.pages.append(page)
            request.promised -= 1
        self._claims -= pages
        self._backed -= pages
        self._held += pages
        return True

    def leave(self, request: DecodeRequest) -> None:
        """It is over; what it had of the pool is somebody else's already."""
        held = max(request.prompt_pages, len(request.pages))
        awaited = 0 if request.pages else request.prompt_pages - request.skipped
        self.give_back(request.committed, request.promised, held, awaited)

    def give_back(self, committed: int, claims: int, held: int, prompts: int) -> None:
        """So much of each is over."""
        self.committed -= committed
        self._claims -= claims
        self._held -= held
        self._prompts -= prompts
        self._balance()

    def _balance(self) -> None:
        """Back the claims as far as there is room, and no more than them."""
        missing = self._claims - self._backed
        if missing < 0:
            self._pool.unpromise(-missing)
            self._backed = self._claims
        elif missing > 0:
            if self._limit is not None:
                missing = min(missing, self._limit - self._held + self._prompts - self._backed)
            self._backed += self._pool.promise_up_to(max(0, missing))
