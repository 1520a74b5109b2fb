"""Pages for prompts: missing pages come from the pool, or from the decode phase if the prompt is local.

Pages of groups without a sliding window are allocated for the whole prompt. For groups with a window, the pages that
are needed at one time are backed_pages; they are allocated chunk by chunk (`cover`), while pages that no further chunk
attends to are retired.
"""

from prefill_worker.decode_peers import LocalDecode
from prefill_worker.request import PrefillRequest
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import FREED
from tandem.protocol.messages import PeerRef


class PromptPages:
    """Allocates the pages of prompts.

    Cached pages are only read; the others belong to the request, or to the lease of a local prompt. Full pages are
    cached once they are computed. Called under the scheduler's lock. Owned by the prefill scheduler.
    """

    def __init__(self, cache: PrefixCache, me: PeerRef, local: LocalDecode) -> None:
        self._cache = cache
        self._kv = cache.kv
        self._me = me
        self._local = local

    def take(self, request: PrefillRequest) -> bool:
        """Allocate all pages of groups without a window, and count cached tokens as computed.

        Returns False if there are too few free pages. Raises the `TandemError` of a local lease that has ended.
        """
        if request.local:
            self._take_local(request)
        else:
            ref, needed = request.task.ref, request.pages_needed
            try:
                pages, backed_pages = self._cache.allocate(ref, request.prefix, needed, request.prompt_tokens)
            except ResourceExhausted:
                return False
            request.pages, request.backed_pages, request.reserved_pages = pages, backed_pages, backed_pages
        request.cached = request.prefix.known * self._kv.page_tokens
        request.computed = request.launched = request.cached
        return True

    def cover(self, request: PrefillRequest, tokens: int) -> int:
        """Allocate the pages for the request's next `tokens` tokens, and return for how many of them there are pages.

        The result may be less, even 0, while other requests read pages that this request has retired; the pages become
        free when those retire them too. Models without windows need no call, because `take` has allocated all pages.
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
        """Let other requests read the full pages of a computed prompt.

        The decode phase publishes the pages of a lease.
        """
        if not request.local:
            self._cache.publish(request.task.ref, request.prefix, request.pages)
            self._give_up(request, request.prompt_tokens)
            self._unreserve(request)

    def release(self, request: PrefillRequest) -> None:
        """Free the pages of a request, which nothing uses any more."""
        if request.local:
            self._cache.release(request.prefix)
        else:
            self._cache.leave(request.task.ref, request.prefix, request.pages)
            self._unreserve(request)
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
        """Allocate at most `count` more pages for groups with a window."""
        if not count:
            return []
        if request.local:
            return self._more_of_lease(request, count)
        pool = self._cache.pool
        with pool.lock:
            request.backed_pages += pool.reserve_up_to(request.reserved_pages - request.backed_pages)
            count = min(count, request.backed_pages)
            request.backed_pages -= count
            request.reserved_pages -= count
            return pool.allocate(request.task.ref, count, from_reserved=True)

    def _more_of_lease(self, request: PrefillRequest, count: int) -> list[int]:
        """Take more pages of a local prompt's lease.

        When there are no others, the lease's own pages that no chunk attends to are reused. Until then they keep their
        contents, which the decode phase caches.
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
        """Retire the pages that tokens from `position` on do not attend to.

        Other requests may read them while they are cached.
        """
        if not self._kv.dead(request.pages, position):
            return
        cache, ref = self._cache, request.task.ref
        cache.publish(ref, request.prefix, request.pages, position // self._kv.page_tokens, all_groups=False)
        request.reserved_pages += cache.retire(ref, request.prefix, request.pages, position)

    def _unreserve(self, request: PrefillRequest) -> None:
        self._cache.pool.unreserve(request.backed_pages)
        request.backed_pages = request.reserved_pages = 0
