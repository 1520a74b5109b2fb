"""The prefix cache: which pages hold the KV of which prefix, so that it is neither computed nor sent again.

Only full pages are indexed, each by a digest of its tokens and all before them (`wire/page_digests.py`). The digests of
one prefix are a path in a tree, and each reader of a page reads those before it as well, so the pages along a path have
fewer and fewer readers. A path is released from its end: the page that the pool evicts first, the least recently
released one, is always a leaf, and no page is ever left that no path leads to.

The life of a request's `Prefix`:

    promise, allocate   retain the known pages, at most as many as its tokens but one fill: a step has to compute
                        something. The missing pages are promised to it, or allocated as its own
    publish             its own full pages are computed and indexed. Where another request was first, the page stays
                        its own, and the other one is retained as well, unused: the path to later pages stays whole
    leave               it reads nothing any more; the pages it owns are freed

A page is never written once it is published: a prefix consists of full pages.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from engine.cache.page_pool import PagePool
from engine.cache.prefix_log import PrefixLog, runs_of
from wire.errors import Internal, StaleEpoch, TandemError
from wire.messages import RequestRef
from wire.page_digests import page_digests, root_digest
from wire.prefixes import PrefixChanges, PrefixList

PageNaming = Callable[[Sequence[int], int, bytes], list[bytes]]
"""A function like `wire.page_digests.page_digests`, which it is wherever there are tokens."""


@dataclass(slots=True, eq=False)
class Prefix:
    """The path of one request: the digests of its full pages, and the cache's pages that it reads."""

    root: bytes
    digests: list[bytes] = field(default_factory=list)
    readable: int = 0
    """The number of pages that may be read instead of computed."""
    pages: list[int] = field(default_factory=list)
    """The cache's pages of the first digests, each retained once for this request."""


@dataclass(frozen=True, slots=True)
class _Node:
    """An indexed page: `number` is its index in its path, `parent` the digest of the page before it, or the root's."""

    page: int
    number: int
    parent: bytes


class PrefixCache:
    """The index of cached prefixes.

    It owns no page: the pool holds them, as shared while read and as cached until evicted.

    Thread-safe, under the pool's lock; every call takes time in proportion to its pages.
    """

    def __init__(
        self, pool: PagePool, page_tokens: int, *, enabled: bool = True, names: PageNaming = page_digests
    ) -> None:
        """Takes `names`, which computes the digests of full pages; if not `enabled`, nothing is ever indexed."""
        self.pool = pool
        self.page_tokens = page_tokens
        self._enabled = enabled
        self._names = names
        self._nodes: dict[bytes, _Node] = {}
        self._digests: dict[int, bytes] = {}
        self._log = PrefixLog()
        self.query_tokens = 0
        """Tokens of all prompts that were looked up."""
        self.hit_tokens = 0
        """Tokens of those prompts whose KV was cached."""
        pool.on_eviction(self._forget)

    # ---- a request's path ----

    def prefix(self, token_ids: Sequence[int], salt: str) -> Prefix:
        """Returns the digests of a prompt's pages; hashes all its tokens and retains nothing yet."""
        root = root_digest(salt)
        if not self._enabled:
            return Prefix(root)
        digests = self._names(token_ids, self.page_tokens, root)
        return Prefix(root, digests, (len(token_ids) - 1) // self.page_tokens)

    def extend(self, prefix: Prefix, token_ids: Sequence[int]) -> None:
        """Extends the path by the full pages among `token_ids`, the tokens after the last page with a digest."""
        if self._enabled:
            parent = prefix.digests[-1] if prefix.digests else prefix.root
            prefix.digests += self._names(token_ids, self.page_tokens, parent)

    def promise(self, prefix: Prefix, pages: int, prompt_tokens: int, *, aside: int = 0) -> int:
        """Retains the known pages and has the rest of `pages` promised; returns the number promised.

        `aside`: pages that must stay free besides. ResourceExhausted: nothing has changed.
        """
        with self.pool.lock:
            self._read(prefix)
            try:
                self.pool.promise(pages - len(prefix.pages) + aside)
            except TandemError:
                self._let_go(prefix)
                raise
            self.pool.unpromise(aside)
            self._count(prefix, prompt_tokens)
            return pages - len(prefix.pages)

    def allocate(self, owner: RequestRef, prefix: Prefix, pages: int, prompt_tokens: int) -> list[int]:
        """Returns `pages` pages in the order of the prompt: known ones, which are read-only, and new ones, the owner's.

        ResourceExhausted: nothing has changed.
        """
        with self.pool.lock:
            self._read(prefix)
            try:
                new = self.pool.allocate(owner, pages - len(prefix.pages))
            except TandemError:
                self._let_go(prefix)
                raise
            self._count(prefix, prompt_tokens)
            return [*prefix.pages, *new]

    def join(self, prefix: Prefix, pages: int) -> None:
        """Retains the first `pages` pages, which another request reads as well; StaleEpoch if none does any more."""
        with self.pool.lock:
            known = prefix.digests[:pages]
            if len(known) == pages and all(digest in self._nodes for digest in known):
                self._retain(prefix, known)
            if len(prefix.pages) < pages:
                self._let_go(prefix)
                raise StaleEpoch(f"{pages} cached pages are there no longer, not all of them; drop this attempt")

    def publish(self, owner: RequestRef, prefix: Prefix, pages: Sequence[int]) -> None:
        """Indexes `pages`, which hold the KV of all the request's digests: its own ones and those that it reads."""
        with self.pool.lock:
            self._retain(prefix, self._known(prefix.digests[len(prefix.pages) :]))
            first = len(prefix.pages)
            missing = prefix.digests[first:]
            if not missing or missing[0] in self._nodes:
                return  # it could not be retained: pages after it could not be found
            mine = pages[first : len(prefix.digests)]
            self.pool.share(owner, mine)
            parent = prefix.digests[first - 1] if first else prefix.root
            for number, (digest, page) in enumerate(zip(missing, mine, strict=True), first):
                self._nodes[digest] = _Node(page, number, parent)
                self._digests[page] = digest
                self._log.stored(digest, parent)
                parent = digest
            prefix.pages += mine

    def leave(self, owner: RequestRef, prefix: Prefix, pages: Sequence[int]) -> None:
        """Frees those of `pages`, in the order of the prompt, that the owner owns, and releases the others."""
        with self.pool.lock:
            read = prefix.pages
            unread = [page for page, known in zip(pages, read, strict=False) if page != known]
            self.pool.free(owner, [*unread, *pages[len(read) :]])
            self._let_go(prefix)

    def let_go(self, prefix: Prefix) -> None:
        """Releases all pages that the request reads."""
        with self.pool.lock:
            self._let_go(prefix)

    # ---- for the router's copy of the index ----

    def changes(self) -> PrefixChanges | None:
        """Returns what was indexed and evicted since the last call, None if nothing."""
        with self.pool.lock:
            return self._log.take()

    def known(self) -> PrefixList:
        """Returns all that is indexed. Takes a microsecond per page under the pool's lock."""
        with self.pool.lock:
            pages = [(digest, node.parent) for digest, node in self._nodes.items()]
            sequence = self._log.sequence
        return PrefixList(sequence, runs_of(pages))

    # ---- facts ----

    @property
    def events(self) -> tuple[int, int]:
        """The number of pages that were ever indexed, and of those that were evicted."""
        return self._log.stored_pages, self._log.removed_pages

    def __len__(self) -> int:
        """Returns the number of indexed pages."""
        return len(self._nodes)

    def check_integrity(self) -> None:
        """Raises Internal on an inconsistency of the pool or the index.

        It is `PagePool.check_integrity`, and checks that the pool's shared and cached pages are the indexed ones, on
        paths without gaps, of which the pool evicts leaves first.
        """
        with self.pool.lock:
            faults = [*self.pool.faults(), *self._faults()]
        if faults:
            raise Internal(f"The page pool is inconsistent: {'; '.join(faults)}.")

    # ---- inside, under the lock ----

    def _read(self, prefix: Prefix) -> None:
        self._retain(prefix, self._known(prefix.digests[: prefix.readable]))

    def _known(self, digests: Sequence[bytes]) -> list[bytes]:
        """Returns the first of these digests, up to one that is not indexed: nothing after it is indexed either."""
        return list(takewhile(self._nodes.__contains__, digests))

    def _retain(self, prefix: Prefix, digests: Sequence[bytes]) -> None:
        pages = [self._nodes[digest].page for digest in digests]
        prefix.pages += pages[: self.pool.retain(pages)]

    def _let_go(self, prefix: Prefix) -> None:
        """Releases the pages from the end, because the pool evicts in that order and must evict leaves first."""
        self.pool.release(prefix.pages[::-1])
        prefix.pages.clear()

    def _count(self, prefix: Prefix, prompt_tokens: int) -> None:
        self.query_tokens += prompt_tokens
        self.hit_tokens += len(prefix.pages) * self.page_tokens

    def _forget(self, page: int) -> None:
        """Removes a page that the pool evicts."""
        digest = self._digests.pop(page)
        del self._nodes[digest]
        self._log.removed(digest)

    def _faults(self) -> Iterable[str]:
        readers = self.pool.readers()
        if readers.keys() != self._digests.keys() or {n.page: d for d, n in self._nodes.items()} != self._digests:
            yield f"{len(readers)} pages are shared or cached and {len(self._nodes)} are known to the prefix cache"
            return
        order = {page: place for place, page in enumerate(readers)}
        for node in self._nodes.values():
            if not node.number:
                continue
            before = self._nodes.get(node.parent)
            if before is None or before.number != node.number - 1:
                yield f"no path leads to page {node.page}, number {node.number} of its prefix"
            elif readers[before.page] < readers[node.page]:
                yield f"page {node.page} has more readers than page {before.page} before it"
            elif not readers[before.page] and order[before.page] < order[node.page]:
                yield f"page {before.page} is to be taken before page {node.page} behind it"
