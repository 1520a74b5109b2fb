"""Which pages hold the KV of which prefix, so that nobody computes or sends it again.

Only full pages are known here, each by a digest that stands for its tokens and all before them
(`wire/page_digests.py`). The digests of one prefix are a path in a tree, and everyone who reads a page reads those
before it as well, so the pages of a path have fewer and fewer readers. A path is let go from its end: the page that the
pool takes first, the one that was let go longest ago, is always a leaf, and no page is ever left behind that no path
leads to.

A request has one `Prefix`:

    promise, allocate   the pages that are known are read from now on, as many as its tokens fill but one token: a step
                        has to compute something. What is missing is promised to it, or its own
    publish             its own full pages are computed and known to all. Where somebody else was first, the page stays
                        its own, and the other one is read as well, unused: the path to the pages behind stays whole
    leave               it reads nothing any more; what is still its own is free

Nobody writes to a page once it is published: a prefix has no room left.
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
"""As `wire.page_digests.page_digests`, which it is wherever there are tokens."""


@dataclass(slots=True, eq=False)
class Prefix:
    """One request's path: the names of its full pages, and which of the cache's pages it reads."""

    root: bytes
    digests: list[bytes] = field(default_factory=list)
    readable: int = 0
    """How many of them may be read instead of computed."""
    pages: list[int] = field(default_factory=list)
    """The cache's pages of the first digests, each retained for this request once."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A page that is known: `number` in its path, from 0, and the digest of the one before it, or the root's."""

    page: int
    number: int
    parent: bytes


class PrefixCache:
    """Owns no page: all are the pool's, shared as long as somebody reads them, cached as long as there is room.

    Safe from any thread, under the pool's lock; every call takes time in proportion to its pages.
    """

    def __init__(
        self, pool: PagePool, page_tokens: int, *, enabled: bool = True, names: PageNaming = page_digests
    ) -> None:
        """Not `enabled`, nothing is ever known, and all else works as ever. `names` gives those of full pages."""
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
        """Those of them whose KV was there."""
        pool.tell_of_taken(self._forget)

    # ---- a request's path ----

    def prefix(self, token_ids: Sequence[int], salt: str) -> Prefix:
        """The names of a prompt's pages; hashes all its tokens and holds nothing yet."""
        root = root_digest(salt)
        if not self._enabled:
            return Prefix(root)
        digests = self._names(token_ids, self.page_tokens, root)
        return Prefix(root, digests, (len(token_ids) - 1) // self.page_tokens)

    def extend(self, prefix: Prefix, token_ids: Sequence[int]) -> None:
        """`token_ids` are those behind the pages that have a name: the full pages among them get one too."""
        if self._enabled:
            parent = prefix.digests[-1] if prefix.digests else prefix.root
            prefix.digests += self._names(token_ids, self.page_tokens, parent)

    def promise(self, prefix: Prefix, pages: int, prompt_tokens: int, *, aside: int = 0) -> int:
        """Read what is known and have the rest of `pages` promised, if `aside` pages are left then; returns how many
        are promised.

        ResourceExhausted: nothing has changed.
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
        """`pages` pages in the order of the prompt: those that are known, which are read-only, and new ones, the
        owner's. ResourceExhausted: nothing has changed.
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
        """Read the first `pages` pages, which somebody else is reading as well. StaleEpoch if nobody does any more."""
        with self.pool.lock:
            known = prefix.digests[:pages]
            if len(known) == pages and all(digest in self._nodes for digest in known):
                self._retain(prefix, known)
            if len(prefix.pages) < pages:
                self._let_go(prefix)
                raise StaleEpoch(f"{pages} cached pages are there no longer, not all of them; drop this attempt")

    def publish(self, owner: RequestRef, prefix: Prefix, pages: Sequence[int]) -> None:
        """`pages`, the request's own but for those it reads, hold the KV of all its digests: everyone may read them."""
        with self.pool.lock:
            self._retain(prefix, self._known(prefix.digests[len(prefix.pages) :]))
            first = len(prefix.pages)
            missing = prefix.digests[first:]
            if not missing or missing[0] in self._nodes:
                return  # there was no room to read it: what would come behind it could not be found
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
        """Of `pages`, in the order of the prompt, those that are the owner's own are free, the others are let go."""
        with self.pool.lock:
            read = prefix.pages
            unread = [page for page, known in zip(pages, read, strict=False) if page != known]
            self.pool.free(owner, [*unread, *pages[len(read) :]])
            self._let_go(prefix)

    def let_go(self, prefix: Prefix) -> None:
        """Read nothing any more."""
        with self.pool.lock:
            self._let_go(prefix)

    # ---- for those who keep a list of it ----

    def changes(self) -> PrefixChanges | None:
        """What has become known and what is forgotten since the last time, None if nothing."""
        with self.pool.lock:
            return self._log.take()

    def known(self) -> PrefixList:
        """All that is known. Takes a microsecond a page, and the pool's lock meanwhile."""
        with self.pool.lock:
            pages = [(digest, node.parent) for digest, node in self._nodes.items()]
            sequence = self._log.sequence
        return PrefixList(sequence, runs_of(pages))

    # ---- facts ----

    @property
    def events(self) -> tuple[int, int]:
        """Pages that ever became known, and that were forgotten."""
        return self._log.stored_pages, self._log.removed_pages

    def __len__(self) -> int:
        """Pages that are known."""
        return len(self._nodes)

    def check_integrity(self) -> None:
        """As `PagePool.check_integrity`, and that the pool's shared and cached pages are those that are known here, on
        paths without gaps, of which the pool takes leaves first.
        """
        with self.pool.lock:
            faults = [*self.pool.faults(), *self._faults()]
        if faults:
            raise Internal(f"The page pool is inconsistent: {'; '.join(faults)}.")

    # ---- inside, under the lock ----

    def _read(self, prefix: Prefix) -> None:
        self._retain(prefix, self._known(prefix.digests[: prefix.readable]))

    def _known(self, digests: Sequence[bytes]) -> list[bytes]:
        """The first of these, up to one that is not known: what is behind it is not known either."""
        return list(takewhile(self._nodes.__contains__, digests))

    def _retain(self, prefix: Prefix, digests: Sequence[bytes]) -> None:
        pages = [self._nodes[digest].page for digest in digests]
        prefix.pages += pages[: self.pool.retain(pages)]

    def _let_go(self, prefix: Prefix) -> None:
        """From the end: the pool takes what it got first, and that must be a leaf."""
        self.pool.release(prefix.pages[::-1])
        prefix.pages.clear()

    def _count(self, prefix: Prefix, prompt_tokens: int) -> None:
        self.query_tokens += prompt_tokens
        self.hit_tokens += len(prefix.pages) * self.page_tokens

    def _forget(self, page: int) -> None:
        """The pool takes a cached page."""
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
