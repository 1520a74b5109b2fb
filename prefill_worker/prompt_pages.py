"""Pages for prompts: what is missing is taken from the pool, or from the decode half where the prompt is local."""

from engine.cache.prefix_cache import PrefixCache
from prefill_worker.decode_peers import LocalDecode
from prefill_worker.request import PrefillRequest
from wire.errors import ResourceExhausted
from wire.messages import PeerRef


class PromptPages:
    """Allocates the pages of prompts: cached ones are read, the others belong to the request, or to a local lease.

    Full pages are cached once they are computed.
    """

    def __init__(self, cache: PrefixCache, me: PeerRef, local: LocalDecode) -> None:
        self._cache = cache
        self._me = me
        self._local = local

    def take(self, request: PrefillRequest) -> bool:
        """All pages of the prompt; what was cached counts as computed. False while the pool has no room for them.

        The `TandemError` of a local lease that is over.
        """
        destination, prompt_tokens = request.task.destination, request.prompt_tokens
        if request.local and destination is not None:
            own = self._local.allot(destination.lease, request.pages_needed, self._me)
            self._cache.join(request.prefix, request.pages_needed - len(own))
            request.pages = [*request.prefix.pages, *own]
        else:
            ref, needed = request.task.ref, request.pages_needed
            try:
                request.pages = self._cache.allocate(ref, request.prefix, needed, prompt_tokens)
            except ResourceExhausted:
                return False
        request.cached = len(request.prefix.pages) * self._cache.page_tokens
        request.computed = request.launched = request.cached
        return True

    def publish(self, request: PrefillRequest) -> None:
        """The prompt is computed: others may read its full pages. Those of a lease are the decode half's to publish."""
        if not request.local:
            self._cache.publish(request.task.ref, request.prefix, request.pages)

    def give_back(self, request: PrefillRequest) -> None:
        """Nothing touches the pages any more."""
        if request.local:
            self._cache.let_go(request.prefix)
        else:
            self._cache.leave(request.task.ref, request.prefix, request.pages)
        request.pages = []
