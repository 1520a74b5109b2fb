"""Allocates pages for prompts, from the pool or, if the prompt is local, from the lease of the decode phase.

Pages of groups without a sliding window are allocated for the whole prompt. For groups with a window, the pool keeps as
many pages free as the prompt needs at one time. These are allocated chunk by chunk (`cover`), and pages to which no
further chunk attends are released. The same applies to groups of state layers. In models that have them, the chunks of
a prompt also end where a state is worth keeping for other prompts (`_chunk_end`).
"""

from prefill_worker.decode_peers import LocalDecode
from prefill_worker.request import PrefillRequest
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import FREED
from tandem.protocol.messages import PeerRef


class PromptPages:
    """Allocates and frees the pages of prompts.

    Cached pages are only read; the others belong to the request, or to the lease of a local prompt. Full pages are
    cached once they are computed. Called under the scheduler's lock. Owned by the prefill scheduler.
    """

    def __init__(self, cache: PrefixCache, me: PeerRef, local: LocalDecode) -> None:
        self._cache = cache
        self._kv = cache.kv
        self._me = me
        self._local = local

    def take(self, request: PrefillRequest) -> bool:
        """Allocate all pages of groups without a window, and mark cached tokens as computed.

        Returns False if there are too few free pages. Raises a `TandemError` if the lease of a local prompt has ended.
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
        request.reloaded = self._cache.take_reloaded(request.prefix) * self._kv.page_tokens
        if self._kv.state_groups:
            request.indexed = self._cache.indexed(request.prefix) * self._kv.page_tokens
        request.computed = request.launched = request.cached
        return True

    def cover(self, request: PrefillRequest, tokens: int) -> int:
        """Allocate KV pages for the request's next `tokens` tokens, and return how many of these tokens have pages.

        The result may be smaller, even 0, while other requests read pages that have left this request's sliding window;
        such a page becomes free when the last reader releases it. In models with state layers it may also be smaller so
        that the chunk ends where a state is kept. Models without sliding windows and states need no call, because
        `take` has allocated all pages.
        """
        kv = self._kv
        if not request.local:
            self._release_unattended(request, request.computed)
        end = self._chunk_end(request, request.launched + tokens) if kv.state_groups else request.launched + tokens
        seen = kv.seen(request.computed, request.computed // kv.page_tokens, kv.numbers(end))
        with_kv = (entry for entry in seen if entry % kv.groups < kv.groups - kv.state_groups)
        missing = [entry for entry in with_kv if request.pages[entry] == FREED]
        for entry, page in zip(missing, self._more(request, len(missing)), strict=False):
            request.pages[entry] = page
        short = next((entry for entry in missing if request.pages[entry] == FREED), None)
        covered = end if short is None else min(end, short // kv.groups * kv.page_tokens)
        covered = max(0, covered - request.launched)
        return covered if not covered or self._cover_states(request, request.launched + covered) else 0

    def _chunk_end(self, request: PrefillRequest, end: int) -> int:
        """Return the end of a chunk that may extend to position `end`.

        Other prompts can reuse a state only where a chunk ends with a page. That costs a step, so it is done at two
        positions: at the end of the prompt's last page but the one of its last token, where an equal prompt or the next
        turn of a conversation begins; and where the pages of other prompts that are equal so far end, because a third
        prompt may begin with them too.
        """
        return min((kept for kept in self._kept_states(request) if request.launched < kept < end), default=end)

    def _kept_states(self, request: PrefillRequest) -> tuple[int, int]:
        """Return the two positions of `_chunk_end` before which the prompt's state is kept for other prompts."""
        page = self._kv.page_tokens
        return request.indexed, (request.prompt_tokens - 1) // page * page

    def _cover_states(self, request: PrefillRequest, end: int) -> bool:
        """Allocate the state pages of a chunk that ends at position `end`; return False if there are too few pages."""
        kv = self._kv
        number = (end - 1) // kv.page_tokens
        entries = range((number + 1) * kv.groups - kv.state_groups, (number + 1) * kv.groups)
        missing = [entry for entry in entries if request.pages[entry] == FREED]
        more = self._more(request, len(missing))
        for entry, page in zip(missing, more, strict=False):
            request.pages[entry] = page
        if end in {*self._kept_states(request), request.prompt_tokens}:
            request.prefix.states.add(number)
        return len(more) == len(missing)

    def publish(self, request: PrefillRequest) -> None:
        """Add the full pages of a computed prompt to the prefix cache, so that other requests can read them.

        Does nothing for a local prompt, whose pages the decode phase adds.
        """
        if not request.local:
            self._cache.publish(request.task.ref, request.prefix, request.pages)
            self._release_unattended(request, request.prompt_tokens)
            self._unreserve(request)

    def release(self, request: PrefillRequest) -> None:
        """Free the pages of a request. No step and no write may use them."""
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
        """Allocate at most `count` more pages from a local prompt's lease.

        If the lease has too few pages left, pages of the prompt to which no further chunk attends are reused. Pages
        keep their contents until they are reused, so that the decode phase can cache them.
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

    def _release_unattended(self, request: PrefillRequest, position: int) -> None:
        """Release the pages to which tokens from `position` on do not attend.

        Pages that are cached remain readable for other requests.
        """
        if not self._kv.dead(request.pages, position):
            return
        cache, ref = self._cache, request.task.ref
        cache.publish(ref, request.prefix, request.pages, position // self._kv.page_tokens, all_groups=False)
        request.reserved_pages += cache.retire(ref, request.prefix, request.pages, position)

    def _unreserve(self, request: PrefillRequest) -> None:
        self._cache.pool.unreserve(request.backed_pages)
        request.backed_pages = request.reserved_pages = 0
