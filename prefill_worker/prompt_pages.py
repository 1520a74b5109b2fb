"""Pages for prompts: what is missing is taken from the pool, or from the decode half where the prompt is local.

Pages of groups without a window are taken for the whole prompt. Those of groups with a window are promised, as many as
are needed at a time, and taken chunk by chunk (`cover`), while those that no chunk sees any more are given up.
"""

from prefill_worker.decode_peers import LocalDecode
from prefill_worker.request import PrefillRequest
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import FREED
from tandem.protocol.messages import PeerRef


class PromptPages:
    """Allocates the pages of prompts: cached ones are read, the others belong to the request, or to a local lease.

    Full pages are cached once they are computed.
    """

    def __init__(self, cache: PrefixCache, me: PeerRef, local: LocalDecode) -> None:
        self._cache = cache
        self._kv = cache.kv
        self._me = me
        self._local = local

    def take(self, request: PrefillRequest) -> bool:
        """All pages of groups without a window; what was cached counts as computed. False while there is no room.

        The `TandemError` of a local lease that is over.
        """
        if request.local:
            self._take_local(request)
        else:
            ref, needed = request.task.ref, request.pages_needed
            try:
                pages, promised = self._cache.allocate(ref, request.prefix, needed, request.prompt_tokens)
            except ResourceExhausted:
                return False
            request.pages, request.promised, request.claimed = pages, promised, promised
        request.cached = request.prefix.known * self._kv.page_tokens
        request.computed = request.launched = request.cached
        return True

    def cover(self, request: PrefillRequest, tokens: int) -> int:
        """Take the pages for the request's next `tokens` tokens; returns for how many of them there are pages.

        Fewer, perhaps none, while other requests read pages that this one has given up; they give them up in their
        turn. Models without windows need no call: `take` has taken all pages.
        """
        kv = self._kv
        if not request.local:
            self._give_up(request, request.computed)
        end = request.launched + tokens
        seen = kv.seen(request.computed, request.computed // kv.page_tokens, kv.numbers(end))
        missing = [entry for entry in seen if request.pages[entry] == FREED]
        for entry, page in zip(missing, self._more(request, len(missing)), strict=False):
            request.pages[entry] = page
        short = next((entry for entry in missing if request.pages[entry] == FREED), None)
        covered = end if short is None else min(end, short // kv.groups * kv.page_tokens)
        return max(0, covered - request.launched)

    def publish(self, request: PrefillRequest) -> None:
        """The prompt is computed: others may read its full pages. Those of a lease are the decode half's to publish."""
        if not request.local:
            self._cache.publish(request.task.ref, request.prefix, request.pages)
            self._give_up(request, request.prompt_tokens)
            self._unpromise(request)

    def release(self, request: PrefillRequest) -> None:
        """Nothing touches the pages any more."""
        if request.local:
            self._cache.release(request.prefix)
        else:
            self._cache.leave(request.task.ref, request.prefix, request.pages)
            self._unpromise(request)
        request.pages = []

    def _take_local(self, request: PrefillRequest) -> None:
        destination, kv = request.task.destination, self._kv
        assert destination is not None
        own = self._local.allocate_pages(destination.lease, request.pages_needed, self._me)
        full = kv.full_groups
        known = request.pages_needed - len(own) // full if full else self._local.cached_pages(destination.lease)
        self._cache.join(request.prefix, known)
        entries = [FREED] * ((request.pages_needed - known) * kv.groups)
        for index, group in enumerate(group for group, window in enumerate(kv.windows) if window is None):
            entries[group :: kv.groups] = own[index::full]
        request.pages = [*request.prefix.pages, *entries]

    def _more(self, request: PrefillRequest, count: int) -> list[int]:
        """Take at most `count` further pages for groups with a window."""
        if not count:
            return []
        if request.local:
            return self._more_of_lease(request, count)
        pool = self._cache.pool
        with pool.lock:
            request.promised += pool.promise_up_to(request.claimed - request.promised)
            count = min(count, request.promised)
            request.promised -= count
            request.claimed -= count
            return pool.allocate(request.task.ref, count, from_promise=True)

    def _more_of_lease(self, request: PrefillRequest, count: int) -> list[int]:
        """Take pages of the lease; its own ones that no chunk sees are used again once there are no others.

        Until then they keep their contents, which the decode half caches.
        """
        destination = request.task.destination
        assert destination is not None
        read = request.prefix.pages
        for entry in self._kv.dead(read, request.computed):
            request.pages[entry] = FREED
        self._cache.retire_read(request.prefix, request.computed)
        more = list(self._local.allocate_chunk_pages(destination.lease, count, request.computed, self._me))
        for entry in self._kv.dead(request.pages, request.computed)[: count - len(more)]:
            more.append(request.pages[entry])
            request.pages[entry] = FREED
        return more

    def _give_up(self, request: PrefillRequest, position: int) -> None:
        """Give up the pages that tokens from `position` on do not see; others may read them while they are cached."""
        if not self._kv.dead(request.pages, position):
            return
        cache, ref = self._cache, request.task.ref
        cache.publish(ref, request.prefix, request.pages, position // self._kv.page_tokens, all_groups=False)
        request.claimed += cache.retire(ref, request.prefix, request.pages, position)

    def _unpromise(self, request: PrefillRequest) -> None:
        self._cache.pool.unpromise(request.promised)
        request.promised = request.claimed = 0
