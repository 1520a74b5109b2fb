"""The prefix cache: which pages hold the KV of which prefix, so that it is neither computed nor sent again.

Only full pages are indexed, each by a digest of its tokens and all before them (`tandem/protocol/page_digests.py`).
The digests of one prefix are a path in a tree. A digest has a page in each group of layers
(`tandem/protocol/kv_pages.py`). In groups without a window, each reader of a page reads those before it as well, so
the pages along a path have fewer and fewer readers. A path is released from its end: the page that the pool evicts
first, the least recently released one, is always a leaf, and no page is ever left that no path leads to. With the page
of one such group, the digest loses all others.

In groups with a window, a reader of n pages needs only the last ⌈(window - 1) / page⌉ of them. A page behind the window
is released while its request runs. It stays cached until it is evicted, so that a prefix that ends there is still
known, whatever follows it in other prompts. Such a page may be evicted before others of its path, or may be missing;
the next request that computes it gives it back.

The life of a request's `Prefix`:

    promise, allocate   retain the known pages, at most as many as its tokens but one fill: a step has to compute
                        something. The missing pages are promised to it, or allocated as its own
    retire              pages that it sees no more are released, or, if they were its own, cached or freed
    publish             its own full pages are computed and indexed. Where another request was first, the page stays
                        its own, and the other one is retained as well, unused: the path to later pages stays whole
    leave               it reads nothing any more; the pages it owns are freed

A page is never written once it is published: a prefix consists of full pages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_log import PrefixLog, runs_of
from tandem.protocol.errors import Internal, StaleEpoch, TandemError
from tandem.protocol.kv_pages import FREED, KvPages, held_pages
from tandem.protocol.messages import RequestRef
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import PrefixChanges, PrefixList

PageNaming = Callable[[Sequence[int], int, bytes], list[bytes]]
"""A function like `tandem.protocol.page_digests.page_digests`, which it is wherever there are tokens."""


@dataclass(slots=True, eq=False)
class Prefix:
    """The path of one request: the digests of its full pages, and the cache's pages that it reads."""

    root: bytes
    digests: list[bytes] = field(default_factory=list)
    readable: int = 0
    """The number of digests whose pages may be read instead of computed."""
    known: int = 0
    """The number of digests, of the first ones, that have entries in `pages`."""
    pages: list[int] = field(default_factory=list)
    """The cache's pages of these digests, as `KvPages` lists them, each retained once for this request, or FREED."""

    @property
    def held(self) -> int:
        """The number of pages that are retained."""
        return len(held_pages(self.pages))


@dataclass(slots=True)
class _Node:
    """Indexed pages: `number` is their index in their path, `parent` the digest before it, or the root's."""

    pages: list[int]
    """The page of each group, or FREED."""
    number: int
    parent: bytes


class PrefixCache:
    """The index of cached prefixes.

    It owns no page: the pool holds them, as shared while read and as cached until evicted.

    Thread-safe, under the pool's lock; every call takes time in proportion to its pages.
    """

    def __init__(self, pool: PagePool, kv: KvPages, *, enabled: bool = True, names: PageNaming = page_digests) -> None:
        """Takes `names`, which computes the digests of full pages; if not `enabled`, nothing is ever indexed."""
        self.pool = pool
        self.kv = kv
        self.page_tokens = kv.page_tokens
        self._full = [group for group, window in enumerate(kv.windows) if window is None]
        windows = enumerate(kv.windows)
        self._windowed = [(group, kv.numbers(window - 1)) for group, window in windows if window is not None]
        """Groups with a window, each with the number of pages before a page's first position that its tokens see."""
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

    def prefix(self, token_ids: Sequence[int], salt: str, *, reads: bool = True) -> Prefix:
        """Returns the digests of a prompt's pages; hashes all its tokens and retains nothing yet.

        Without `reads` the request computes all of them, whatever is cached.
        """
        root = root_digest(salt)
        if not self._enabled:
            return Prefix(root)
        digests = self._names(token_ids, self.page_tokens, root)
        return Prefix(root, digests, (len(token_ids) - 1) // self.page_tokens if reads else 0)

    def extend(self, prefix: Prefix, token_ids: Sequence[int]) -> None:
        """Extends the path by the full pages among `token_ids`, the tokens after the last page with a digest."""
        if self._enabled:
            parent = prefix.digests[-1] if prefix.digests else prefix.root
            prefix.digests += self._names(token_ids, self.page_tokens, parent)

    def promise(
        self, prefix: Prefix, pages: int, prompt_tokens: int, *, aside: int = 0, position: int | None = None
    ) -> int:
        """Retains the known pages and has the rest of `pages` promised; returns the number promised.

        `aside`: pages that must stay free besides. Of groups with a window only the pages are retained that tokens
        from `position` on see, None = from the end of the known ones. ResourceExhausted: nothing has changed.
        """
        with self.pool.lock:
            self._read(prefix, position)
            try:
                self.pool.promise(pages - prefix.held + aside)
            except TandemError:
                self._release_prefix(prefix)
                raise
            self.pool.unpromise(aside)
            self._count(prefix, prompt_tokens)
            return pages - prefix.held

    def allocate(self, owner: RequestRef, prefix: Prefix, numbers: int, prompt_tokens: int) -> tuple[list[int], int]:
        """Returns the entries of `numbers` pages (`KvPages`): known ones, which are read-only, and new ones, its own.

        Those of groups with a window are FREED but for the known ones: as many as are needed at a time are promised,
        which the second result counts. ResourceExhausted: nothing has changed.
        """
        with self.pool.lock:
            self._read(prefix, None)
            missing = numbers - prefix.known
            promised = self.kv.held(prompt_tokens) - len(self._full) * numbers
            try:
                self.pool.promise(promised + len(self._full) * missing)
            except TandemError:
                self._release_prefix(prefix)
                raise
            new = self.pool.allocate(owner, len(self._full) * missing, from_promise=True)
            self._count(prefix, prompt_tokens)
            if not self._windowed:
                return [*prefix.pages, *new], 0
            rest = [FREED] * (missing * self.kv.groups)
            for index, group in enumerate(self._full):
                rest[group :: self.kv.groups] = new[index :: len(self._full)]
            return [*prefix.pages, *rest], promised

    def join(self, prefix: Prefix, numbers: int) -> None:
        """Retains the first `numbers` pages, which another request reads as well; StaleEpoch if none does any more."""
        with self.pool.lock:
            if numbers <= self._hit(prefix.digests[:numbers]):
                self._retain(prefix, numbers, None)
            if prefix.known < numbers:
                self._release_prefix(prefix)
                raise StaleEpoch(f"{numbers} cached pages are there no longer, not all of them; drop this attempt")

    def retire(self, owner: RequestRef, prefix: Prefix, pages: list[int], position: int) -> int:
        """Gives up the pages that tokens from `position` on do not see; returns their number.

        Their entries become FREED. The caller has made sure that no step that runs reads them. Its own are cached if
        their digest is indexed, so that nobody reads them but for the caller: every one of them is free capacity.
        """
        if not self._windowed:
            return 0
        with self.pool.lock:
            dead = self.kv.dead(pages, position)
            for entry in dead:
                page, pages[entry] = pages[entry], FREED
                if entry < len(prefix.pages) and prefix.pages[entry] == page:
                    self._release(prefix, entry)
                elif self._give(owner, prefix, entry, page):
                    self.pool.release([page])
                else:
                    self.pool.free(owner, [page])
            return len(dead)

    def retire_read(self, prefix: Prefix, position: int) -> int:
        """Releases the retained pages that tokens from `position` on do not see; returns their number."""
        with self.pool.lock:
            dead = self.kv.dead(prefix.pages, position)
            for entry in dead:
                self._release(prefix, entry)
            return len(dead)

    def publish(
        self,
        owner: RequestRef,
        prefix: Prefix,
        pages: Sequence[int],
        numbers: int | None = None,
        *,
        all_groups: bool = True,
    ) -> None:
        """Indexes `pages`, which hold the KV of the request's first `numbers` digests, None = of all.

        Without `all_groups`, pages of groups with a window stay the request's own, until `retire` or another call.
        """
        with self.pool.lock:
            end = len(prefix.digests) if numbers is None else min(numbers, len(prefix.digests))
            end = self._retain_path(prefix, end)
            groups, first, shared = self.kv.groups, prefix.known, []
            for number in range(first, end):
                digest, own = prefix.digests[number], list(pages[number * groups : (number + 1) * groups])
                parent = prefix.digests[number - 1] if number else prefix.root
                node = self._nodes.get(digest)
                if not all_groups:
                    for group, _ in self._windowed:
                        own[group] = FREED
                if node is None:
                    prefix.pages += own
                    if new := held_pages(own):
                        shared += new
                        self._nodes[digest] = _Node(own, number, parent)
                        self._digests.update(dict.fromkeys(new, digest))
                        self._log.stored(digest, parent)
                else:
                    prefix.pages += [FREED] * groups
                    for group in self._full:
                        prefix.pages[number * groups + group] = node.pages[group]
            self.pool.share(owner, shared)
            prefix.known = max(first, end)
            if all_groups and self._windowed:
                self._give_published(owner, prefix, pages)

    def leave(self, owner: RequestRef, prefix: Prefix, pages: Sequence[int]) -> None:
        """Frees those of `pages`, as `KvPages` lists them, that the owner owns, and releases the others."""
        with self.pool.lock:
            read = prefix.pages
            unread = [page for page, known in zip(pages, read, strict=False) if page != known]
            self.pool.free(owner, held_pages([*unread, *pages[len(read) :]]))
            self._release_prefix(prefix)

    def release(self, prefix: Prefix) -> None:
        """Releases all pages that the request reads."""
        with self.pool.lock:
            self._release_prefix(prefix)

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
        """The number of digests that were ever indexed, and of those that were evicted."""
        return self._log.stored_pages, self._log.removed_pages

    def __len__(self) -> int:
        """Returns the number of indexed digests."""
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

    def _read(self, prefix: Prefix, position: int | None) -> None:
        self._retain(prefix, self._hit(prefix.digests[: prefix.readable]), position)

    def _hit(self, digests: Sequence[bytes]) -> int:
        """Returns the most of these digests, from the first on, after which a request could go on."""
        if not self._windowed:
            return self._path(digests)
        runs, hit = dict.fromkeys((group for group, _ in self._windowed), 0), 0
        for number, digest in enumerate(digests, 1):
            node = self._nodes.get(digest)
            if node is None and self._full:
                break
            for group in runs:
                there = node is not None and node.pages[group] != FREED
                runs[group] = runs[group] + 1 if there else 0
            if all(runs[group] >= min(needed, number) for group, needed in self._windowed):
                hit = number
        return hit

    def _path(self, digests: Sequence[bytes]) -> int:
        """Returns the number of digests up to the first that is not indexed: nothing after it is indexed either."""
        return next((number for number, digest in enumerate(digests) if digest not in self._nodes), len(digests))

    def _retain(self, prefix: Prefix, end: int, position: int | None) -> None:
        """Retains the pages of the digests from `prefix.known` to `end` that are seen from `position` on.

        If promises do not allow all of them, it retains less, or none in a model with windows.
        """
        kv, first = self.kv, prefix.known
        nodes = [self._nodes.get(digest) for digest in prefix.digests[first:end]]
        seen = end * self.page_tokens if position is None else position
        entries = [FREED] * (len(nodes) * kv.groups)
        for entry in kv.seen(seen, first, end):
            number, group = divmod(entry, kv.groups)
            node = nodes[number - first]
            assert node is not None
            entries[entry - first * kv.groups] = node.pages[group]
        wanted = held_pages(entries)
        kept = self.pool.retain(wanted)
        if kept < len(wanted):
            whole = 0 if self._windowed else kept // kv.groups
            self.pool.release(wanted[whole * kv.groups : kept][::-1])
            end, entries = first + whole, entries[: whole * kv.groups]
        prefix.pages += entries
        prefix.known = max(first, end)

    def _retain_path(self, prefix: Prefix, end: int) -> int:
        """Retains those of the pages without a window that are indexed already, from `prefix.known` to `end`.

        Their entries are not written. Returns the end of what may be published after them.
        """
        first, full = prefix.known, self._full
        known = self._path(prefix.digests[first:end]) if full else 0
        nodes = [self._nodes[digest] for digest in prefix.digests[first : first + known]]
        wanted = [node.pages[group] for node in nodes for group in full]
        kept = self.pool.retain(wanted)
        if kept == len(wanted):
            return end
        whole = kept // len(full)
        self.pool.release(wanted[whole * len(full) : kept][::-1])
        return first + whole  # pages after one that could not be retained could not be found

    def _give_published(self, owner: RequestRef, prefix: Prefix, pages: Sequence[int]) -> None:
        """Shares the request's own pages of groups with a window whose digest is indexed without them."""
        for number in range(prefix.known):
            for group, _ in self._windowed:
                entry = number * self.kv.groups + group
                page = pages[entry]
                if page == FREED or prefix.pages[entry] != FREED:
                    continue
                if self._give(owner, prefix, entry, page):
                    prefix.pages[entry] = page

    def _give(self, owner: RequestRef, prefix: Prefix, entry: int, page: int) -> bool:
        """Shares an owner's page as that of its indexed digest; False if there is no such digest, or it has one."""
        number, group = divmod(entry, self.kv.groups)
        if number >= len(prefix.digests):
            return False
        digest = prefix.digests[number]
        node = self._nodes.get(digest)
        if node is None and not self._full and self._enabled:
            parent = prefix.digests[number - 1] if number else prefix.root
            node = self._nodes[digest] = _Node([FREED] * self.kv.groups, number, parent)
            self._log.stored(digest, parent)
        if node is None or node.pages[group] != FREED:
            return False
        self.pool.share(owner, [page])
        node.pages[group] = page
        self._digests[page] = digest
        return True

    def _release(self, prefix: Prefix, entry: int) -> None:
        page, prefix.pages[entry] = prefix.pages[entry], FREED
        self.pool.release([page])

    def _release_prefix(self, prefix: Prefix) -> None:
        """Releases the pages from the end, because the pool evicts in that order and must evict leaves first."""
        self.pool.release(held_pages(prefix.pages)[::-1])
        prefix.pages.clear()
        prefix.known = 0

    def _count(self, prefix: Prefix, prompt_tokens: int) -> None:
        self.query_tokens += prompt_tokens
        self.hit_tokens += prefix.known * self.page_tokens

    def _forget(self, page: int) -> None:
        """Removes a page that the pool has evicted, with its digest if nobody can find that any more."""
        digest = self._digests.pop(page)
        node = self._nodes[digest]
        group = node.pages.index(page)
        node.pages[group] = FREED
        others = held_pages(node.pages)
        if group in self._full or not others:
            del self._nodes[digest]
            self._log.removed(digest)
            for other in others:
                del self._digests[other]
            self.pool.drop_cached(others)

    def _faults(self) -> Iterator[str]:
        readers = self.pool.readers()
        indexed = {page: digest for digest, node in self._nodes.items() for page in held_pages(node.pages)}
        if readers.keys() != self._digests.keys() or indexed != self._digests:
            yield f"{len(readers)} pages are shared or cached and {len(indexed)} are known to the prefix cache"
            return
        order = {page: place for place, page in enumerate(readers)}
        for node in self._nodes.values():
            for group in self._full:
                yield from self._path_faults(node, group, readers, order)

    def _path_faults(
        self, node: _Node, group: int, readers: Mapping[int, int], order: Mapping[int, int]
    ) -> Iterator[str]:
        """Yields the inconsistencies of a node with the one before it in a group without a window."""
        if not node.number:
            return
        page, before = node.pages[group], self._nodes.get(node.parent)
        if before is None or before.number != node.number - 1:
            yield f"no path leads to page {page}, number {node.number} of its prefix"
            return
        page_before = before.pages[group]
        if readers[page_before] < readers[page]:
            yield f"page {page} has more readers than page {page_before} before it"
        elif not readers[page_before] and order[page_before] < order[page]:
            yield f"page {page_before} is to be taken before page {page} behind it"
