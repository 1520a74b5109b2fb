"""The prefix cache: an index of the pages with the KV of each prefix, so that no KV is computed or sent again.

Only full pages are indexed, each by a digest of its tokens and of all tokens before them
(`tandem/protocol/page_digests.py`). The digests of one prompt are a path in a tree. A digest has one page in each group
of layers (`tandem/protocol/kv_pages.py`).

In groups without a window, a reader of a page also reads all pages before it, so a page has at most as many readers as
the page before it. A path is released from its end, and the pool evicts the least recently released page first. The
evicted page is therefore always a leaf, and lookups can reach all other pages. A digest that loses its page in a group
without a window loses its pages in all groups.

In groups with a window, a reader of n pages needs only the last ⌈(window - 1) / page⌉ of them. A page that has left the
window is released while its request still runs. It stays cached until it is evicted, so that a prefix that ends there
can be reused, whatever follows it in other prompts. Such a page may be evicted before others of its path, or may be
missing; the next request that computes it adds it to the index again.

In groups of state layers, a reader of n pages needs only page n - 1, which has the state after these pages. A page is
indexed only if its state is that after its last position: `Prefix.states` has the numbers of these pages. Routers are
told only the digests that have their state pages, because a request can reuse no prefix that ends at another digest.

The life of a request's `Prefix`:

    reserve, allocate   retain the indexed pages, but never the page of the prompt's last token, because a step has to
                        compute at least one token; reserve the missing pages, or allocate them to the request
    retire              release the pages that have left the window; the request's own become cached or free
    publish             index the request's own full pages, now computed. If another request has indexed the same digest
                        first, the page stays the request's own, and the indexed one is retained as well, unused, so
                        that the path to later pages has no gap
    leave               release all pages that the request reads, and free those that it owns

With tiers (`tandem/engine/cache/tiers/`), a reload is a short request of its own: `begin_reload` retains the indexed
pages of a prompt and allocates pages for those that tiers have, and `complete_reload` publishes the loaded ones and
leaves. So pages that are being loaded are owned, like those of any request, and are found by others only afterwards.
Pages that another worker sends are loaded likewise: `begin_pull` advertises them to the sender's lease, and they are
owned once all of them have arrived.

A page is never written after it is published, because only full pages are indexed.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.pending_saves import PendingSaves
from tandem.engine.cache.prefix_log import PrefixLog, runs_of, tier_pages
from tandem.protocol.errors import Internal, ResourceExhausted, StaleEpoch, TandemError
from tandem.protocol.kv_pages import FREED, STATE, KvPages, held_pages
from tandem.protocol.messages import Lease, RequestRef
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import KvTier, PrefixChanges, PrefixList, PrefixRun

PageNaming = Callable[[Sequence[int], int, bytes], list[bytes]]
"""A function that computes the digests of full pages; it has the signature of `page_digests`."""
Stored = Callable[[PageKey], bool]
"""A function that returns True if a tier has this page."""
TierOf = Callable[[PageKey], KvTier | None]
"""A function that returns the fastest tier that has this page; None if no tier has it."""


@dataclass(slots=True, eq=False)
class Prefix:
    """The path of one request in the index: the digests of its full pages, and the indexed pages that it reads.

    Owned by the request.
    """

    root: bytes
    digests: list[bytes] = field(default_factory=list)
    readable: int = 0
    """The number of leading digests whose pages may be read instead of computed."""
    known: int = 0
    """The number of leading digests that have entries in `pages`."""
    pages: list[int] = field(default_factory=list)
    """The pages of the first `known` digests in the order of `KvPages`: retained once for this request, or FREED."""
    tenant: str = ""
    retention_s: float = 0.0
    """Seconds for which the pages are kept in preference to others after the request has released them."""
    hinted_s: float = 0.0
    """Seconds for which the pages of the first `hinted` digests are kept, if that is longer."""
    hinted: int = 0
    salt: str = ""
    tokens: list[bytes] = field(default_factory=list)
    """The tokens of the page of each digest (`_Node.tokens`).

    It is empty unless the cache reports tokens, and for pages that are loaded ahead of their prompt or for another
    worker: their tokens are reported when a prompt reads them.
    """
    states: set[int] = field(default_factory=set)
    """The numbers of the request's own state pages that have, or will have, the state after their last position."""

    @property
    def held(self) -> int:
        """The number of pages that are retained for this request."""
        return len(held_pages(self.pages))

    def part(self, end: int) -> "Prefix":
        """Return the path of the first `end` digests, all readable; it retains no page."""
        return Prefix(
            self.root,
            self.digests[:end],
            end,
            tenant=self.tenant,
            retention_s=self.retention_s,
            hinted_s=self.hinted_s,
            hinted=self.hinted,
            salt=self.salt,
            tokens=self.tokens[:end],
        )


@dataclass(slots=True)
class _Node:
    """An indexed digest: `number` is its index in its path, `parent` the digest before it, or the root's digest."""

    pages: list[int]
    """The page of this digest in each group of layers; FREED in a group that has none."""
    number: int
    parent: bytes
    tenant: str = ""
    salt: str = ""
    tokens: bytes = b""
    """The token ids of the page as 32-bit integers in the order of this host; b"" unless the cache reports tokens."""


class PrefixCache:
    """The prefix index of one worker, shared by the prefill and the decode scheduler.

    It owns no page: the pool holds the pages, as shared while a request reads them and as cached until they are
    evicted. It is thread-safe, under the pool's lock except for `reusable`. The time of each call is proportional to
    the number of pages that it looks up or changes.
    """

    def __init__(
        self,
        pool: PagePool,
        kv: KvPages,
        *,
        enabled: bool = True,
        names: PageNaming = page_digests,
        reports_tokens: bool = False,
    ) -> None:
        """Create an empty index over `pool`; if `enabled` is False, nothing is ever indexed.

        `names` computes the digests of full pages. If `reports_tokens` is True, the cache keeps the tokens and the
        salts of the indexed pages (about 100 bytes a page), and reports them to routers.
        """
        self.pool = pool
        self.kv = kv
        self.page_tokens = kv.page_tokens
        self._full = [group for group, window in enumerate(kv.windows) if window is None]
        windows = enumerate(kv.windows)
        self._windowed = [(group, kv.preceding(group)) for group, window in windows if window is not None]
        """The groups with a window, each with the number of earlier pages in the window of a page's first token."""
        self._state_groups = [group for group, window in enumerate(kv.windows) if window == STATE]
        self._enabled = enabled
        self._names = names
        self._reports_tokens = reports_tokens
        self._nodes: dict[bytes, _Node] = {}
        self._digests: dict[int, bytes] = {}
        self._log = PrefixLog()
        self._saves: PendingSaves | None = None
        self._tier_of: TierOf = lambda _: None
        self._in_tiers: dict[bytes, KvTier] = {}
        """The digests that are not indexed and that routers know to be in tiers, each with the fastest tier."""
        self._reloaded: set[bytes] = set()
        """The indexed digests that were loaded from tiers, until a prompt reads them."""
        self._tenants: Counter[str] = Counter()
        """The number of indexed digests of each tenant that has any."""
        self.query_tokens = 0
        """The number of tokens of all prompts that were looked up."""
        self.hit_tokens = 0
        """The number of tokens of the looked-up prompts whose KV was cached."""
        pool.on_eviction(self._forget)
        pool.limit_kept(lambda: pool.total // len(self._tenants))

    # ---- a request's path ----

    def prefix(
        self,
        token_ids: Sequence[int],
        salt: str,
        *,
        reads: bool = True,
        tenant: str = "",
        retention_s: float = 0.0,
        hinted_s: float = 0.0,
        hinted_tokens: int = 0,
    ) -> Prefix:
        """Hash all tokens of a prompt, and return the prompt's path; no page is retained yet.

        `salt` separates prefixes that must not be shared. If `reads` is False, the request computes all pages, even
        cached ones. The pages are kept for `retention_s` seconds after the request, and those of the first
        `hinted_tokens` tokens for `hinted_s` seconds, within the share of the `tenant`: the pool divided by the number
        of tenants that have pages in it.
        """
        root = root_digest(salt)
        if not self._enabled:
            return Prefix(root)
        digests = self._names(token_ids, self.page_tokens, root)
        readable = (len(token_ids) - 1) // self.page_tokens if reads else 0
        tokens = self._tokens_of_pages(token_ids)
        return Prefix(
            root,
            digests,
            readable,
            tenant=tenant,
            retention_s=retention_s,
            hinted_s=hinted_s,
            hinted=hinted_tokens // self.page_tokens,
            salt=salt,
            tokens=tokens,
        )

    def extend(self, prefix: Prefix, token_ids: Sequence[int]) -> None:
        """Extend the path with the digests of further full pages.

        `token_ids` are the tokens after the last page that has a digest.
        """
        if self._enabled:
            first, parent = len(prefix.digests), prefix.digests[-1] if prefix.digests else prefix.root
            prefix.digests += self._names(token_ids, self.page_tokens, parent)
            prefix.tokens += self._tokens_of_pages(token_ids)
            # Decoding computes one token after the other, so it has written the state after each of these pages.
            prefix.states.update(range(first, len(prefix.digests)))

    def indexed(self, prefix: Prefix) -> int:
        """Return the number of leading digests that are indexed, whether or not a request could reuse all of them."""
        with self.pool.lock:
            return self._path(prefix.digests[: prefix.readable])

    def reserve(
        self, prefix: Prefix, pages: int, prompt_tokens: int, *, aside: int = 0, position: int | None = None
    ) -> int:
        """Retain the indexed pages of the prompt, and reserve the rest of `pages`; return the number of reserved pages.

        `aside` is a number of further pages that must be free, but are not reserved. In groups with a window, only the
        pages in the windows of the tokens from `position` on are retained; None = from the end of the indexed pages.
        Raises ResourceExhausted, without any change, if too few pages are free.
        """
        with self.pool.lock:
            self._read(prefix, position)
            try:
                # `aside` is reserved here and returned below, to check that these further pages are free.
                self.pool.reserve(pages - prefix.held + aside)
            except TandemError:
                self._release_prefix(prefix)
                raise
            self.pool.unreserve(aside)
            self._count(prefix, prompt_tokens)
            return pages - prefix.held

    def allocate(self, owner: RequestRef, prefix: Prefix, numbers: int, prompt_tokens: int) -> tuple[list[int], int]:
        """Return `numbers` page table entries per group (`KvPages`), and the number of pages reserved for windows.

        Indexed pages are shared and read-only. Groups without a window get newly allocated pages for the other entries.
        In groups with a window, the other entries are FREED, and as many pages are reserved as the request needs at the
        same time; the caller allocates them later. Raises ResourceExhausted, without any change, if too few pages are
        free.
        """
        with self.pool.lock:
            self._read(prefix, None)
            missing = numbers - prefix.known
            reserved = self.kv.held(prompt_tokens) - len(self._full) * numbers
            try:
                self.pool.reserve(reserved + len(self._full) * missing)
            except TandemError:
                self._release_prefix(prefix)
                raise
            new = self.pool.allocate(owner, len(self._full) * missing, from_reserved=True)
            self._count(prefix, prompt_tokens)
            if not self._windowed:
                return [*prefix.pages, *new], 0
            rest = [FREED] * (missing * self.kv.groups)
            for index, group in enumerate(self._full):
                rest[group :: self.kv.groups] = new[index :: len(self._full)]
            return [*prefix.pages, *rest], reserved

    def join(self, prefix: Prefix, numbers: int) -> None:
        """Retain the pages of the first `numbers` digests of the path.

        Raises StaleEpoch, and retains nothing, if any of these pages is missing from the index.
        """
        with self.pool.lock:
            if numbers <= self._hit(prefix.digests[:numbers]):
                self._retain(prefix, numbers, None)
            if prefix.known < numbers:
                self._release_prefix(prefix)
                raise StaleEpoch(f"{numbers} cached pages are there no longer, not all of them; drop this attempt")

    def retire(self, owner: RequestRef, prefix: Prefix, pages: list[int], position: int) -> int:
        """Release the pages that are outside the windows of the tokens from `position` on; return their number.

        Their entries in `pages` become FREED. The caller ensures that no running step reads them. Pages that the
        request owns become cached if the index can use them, and are freed otherwise; either way they count as free
        again.
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
        """Release retained pages that are outside the windows of the tokens from `position` on; return their number."""
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
        """Index the request's pages that hold the KV of its first `numbers` digests; None = of all digests.

        If `all_groups` is False, the request keeps its pages of groups with a window until `retire` or a later call.
        """
        with self.pool.lock:
            end = len(prefix.digests) if numbers is None else min(numbers, len(prefix.digests))
            end = self._retain_path(prefix, end)
            self._learn_tokens(prefix, prefix.known, end)
            groups, first, shared = self.kv.groups, prefix.known, []
            for number in range(first, end):
                digest, own = prefix.digests[number], list(pages[number * groups : (number + 1) * groups])
                node = self._nodes.get(digest)
                for group, _ in self._windowed:
                    if not all_groups or not self._complete(prefix, number, group):
                        own[group] = FREED
                if node is None:
                    prefix.pages += own
                    if new := held_pages(own):
                        shared += new
                        node = self._nodes[digest] = self._node(prefix, number, own)
                        self._digests.update(dict.fromkeys(new, digest))
                        if self._has_states(node):
                            self._note_stored(digest, node.parent)
                else:
                    # Another request indexed this digest first: `_retain_path` has retained the indexed pages, and
                    # this request keeps its own.
                    prefix.pages += [FREED] * groups
                    for group in self._full:
                        prefix.pages[number * groups + group] = node.pages[group]
            self.pool.share(owner, shared)
            prefix.known = max(first, end)
            if all_groups and self._windowed:
                self._give_published(owner, prefix, pages)

    def leave(self, owner: RequestRef, prefix: Prefix, pages: Sequence[int]) -> None:
        """Release the indexed pages that the request reads, and free those of `pages` that `owner` owns.

        `pages` are in the order of `KvPages`.
        """
        with self.pool.lock:
            read = prefix.pages
            unread = [page for page, known in zip(pages, read, strict=False) if page != known]
            self.pool.free(owner, held_pages([*unread, *pages[len(read) :]]))
            self._release_prefix(prefix)

    def release(self, prefix: Prefix) -> None:
        """Release all indexed pages that the request reads."""
        with self.pool.lock:
            self._release_prefix(prefix)

    # ---- tiers ----

    def save_to(self, saves: PendingSaves, tier_of: TierOf) -> None:
        """Add each indexed page to `saves` when its last reader releases it, and drop it when it is evicted.

        `tier_of` finds the pages that the index reports to routers as being in tiers.
        """
        self._saves, self._tier_of = saves, tier_of
        self.pool.on_cached(lambda page: saves.add(page, self._key(page)))

    def tier_changed(self, digest: bytes) -> None:
        """Report to routers that a tier has got or lost a page of this digest, unless the digest is indexed."""
        with self.pool.lock:
            if self._is_indexed(digest):
                return
            before, tier = self._in_tiers.get(digest), self._slowest_tier(digest)
            if tier is not before:
                self._log.moved(digest, tier)
                self._note_tier(digest, tier)

    def take_reloaded(self, prefix: Prefix) -> int:
        """Return the number of the prefix's known digests that were loaded from tiers and that no prompt has read yet.

        They count as read from then on.
        """
        if not self._reloaded:
            return 0
        with self.pool.lock:
            read = self._reloaded.intersection(prefix.digests[: prefix.known])
            self._reloaded -= read
            return len(read)

    def reusable(self, prefix: Prefix, stored: Stored) -> tuple[int, list[PageKey]]:
        """Return the number of leading digests that a request could reuse if the stored pages were loaded, and these.

        The pages are those that are missing in the pool. They are in the order of `KvPages`. The pool's lock is not
        taken, because a long prompt has thousands of pages: the result is out of date if pages are indexed or evicted
        meanwhile, and `begin_reload` looks again.
        """
        digests = prefix.digests[: prefix.readable]
        hit = self._hit(digests, stored)
        numbers = (divmod(entry, self.kv.groups) for entry in self.kv.seen(hit * self.page_tokens, 0, hit))
        keys = [PageKey(digests[number], group) for number, group in numbers]
        return hit, [key for key in keys if not self._has(key)]

    def hit(self, prefix: Prefix) -> int:
        """Return the number of leading digests that a request could reuse now."""
        with self.pool.lock:
            return self._hit(prefix.digests[: prefix.readable])

    def begin_reload(self, owner: RequestRef, prefix: Prefix, end: int) -> list[int]:
        """Allocate pages to `owner` for those that a reader of the first `end` digests misses; return them.

        They are listed as by `KvPages`, with FREED for all others. The indexed pages are retained for `prefix`. The
        caller fills the pages and then calls `complete_reload`. Raises ResourceExhausted, without any change, if too
        few pages are free.
        """
        with self.pool.lock:
            indexed, seen = self._path(prefix.digests[:end]), end * self.page_tokens
            self._retain(prefix, indexed, seen)
            entries = self.kv.seen(seen, 0, end)
            held = len(prefix.pages)
            missing = [entry for entry in entries if entry >= held or prefix.pages[entry] == FREED]
            try:
                if prefix.known < indexed:
                    raise ResourceExhausted("too few KV pages are free to load others")
                taken = self.pool.allocate(owner, len(missing))
            except TandemError:
                self._release_prefix(prefix)
                raise
            pages = [FREED] * (end * self.kv.groups)
            for entry, page in zip(missing, taken, strict=True):
                pages[entry] = page
            return pages

    def begin_pull(self, lease: Lease, prefix: Prefix, end: int) -> tuple[list[int], int]:
        """Advertise pages to `lease` for those that a reader of the first `end` digests needs after the cached ones.

        Returns the pages of all these digests, listed as by `KvPages` with FREED for those that are not sent, and the
        number of leading digests whose pages a request could reuse already: they are retained for `prefix`. The caller
        adopts the pages when they have arrived and calls `complete_reload`; otherwise it frees the pages of the lease
        and calls `release`. Raises ResourceExhausted, without any change, if too few pages are free.
        """
        with self.pool.lock:
            held, seen = self._hit(prefix.digests[:end]), end * self.page_tokens
            self._retain(prefix, held, seen)
            entries = self.kv.seen(seen, held, end)
            try:
                if prefix.known < held:
                    raise ResourceExhausted("too few KV pages are free to pull others")
                taken = self.pool.advertise(lease, len(entries), from_reserved=False)
            except TandemError:
                self._release_prefix(prefix)
                raise
            pages = [FREED] * (end * self.kv.groups)
            for entry, page in zip(entries, taken, strict=True):
                pages[entry] = page
            return pages, held

    def hold(self, prefix: Prefix) -> int:
        """Retain all pages that a request could reuse, so that they stay until `release`; return their digests' number.

        The pages are those in `prefix.pages`, listed as by `KvPages`.
        """
        with self.pool.lock:
            self._read(prefix, None)
            return prefix.known

    def complete_reload(self, owner: RequestRef, prefix: Prefix, pages: list[int], failed: Collection[int]) -> None:
        """Index the loaded pages, and free those whose indices in `pages` are in `failed`."""
        groups = self.kv.groups
        numbers = (entry // groups for entry in failed if entry % groups in self._full)
        end = min(numbers, default=len(pages) // groups)
        with self.pool.lock:
            self.pool.free(owner, [pages[entry] for entry in failed])
            for entry in failed:
                pages[entry] = FREED
            # The state in a loaded page is that after its last position, because only such pages are stored.
            prefix.states.update(range(end))
            loaded = {prefix.digests[entry // groups] for entry, page in enumerate(pages) if page != FREED}
            self.publish(owner, prefix, pages, end)
            self._reloaded |= loaded & self._nodes.keys()
            self.leave(owner, prefix, pages)

    # ---- for the router's copy of the index ----

    def changes(self) -> PrefixChanges | None:
        """Return the digests indexed and evicted since the last call; None if there are none.

        In a model with state layers, these are the digests that got and lost their states.
        """
        with self.pool.lock:
            changes = self._log.take()
            if changes is None or not self._reports_tokens:
                return changes
            return replace(changes, stored=self._with_tokens(changes.stored))

    def known(self) -> PrefixList:
        """Return the whole index; in a model with state layers, the digests that have their states.

        The call holds the pool's lock for about a microsecond per page.
        """
        with self.pool.lock:
            pages = [(digest, node.parent) for digest, node in self._nodes.items() if self._has_states(node)]
            stored, in_tiers, sequence = runs_of(pages), list(self._in_tiers.items()), self._log.sequence
            if self._reports_tokens:
                stored = self._with_tokens(stored)
        return PrefixList(sequence, stored, tier_pages(in_tiers))

    def _tokens_of_pages(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the tokens of each full page of `token_ids`; no pages unless the cache reports tokens."""
        if not self._reports_tokens:
            return []
        size = self.page_tokens
        return [array("I", token_ids[end - size : end]).tobytes() for end in range(size, len(token_ids) + 1, size)]

    def _with_tokens(self, runs: Iterable[PrefixRun]) -> tuple[PrefixRun, ...]:
        """Add to each run of indexed digests their tokens and their salt."""
        with_tokens = []
        for run in runs:
            nodes, parent = [self._nodes[digest] for digest in run.digests], run.parent
            # Pages whose tokens are not known yet are in runs of their own.
            for _, part in groupby(zip(run.digests, nodes, strict=True), lambda page: bool(page[1].tokens)):
                digests, described = zip(*part, strict=True)
                token_ids = array("I", b"".join(node.tokens for node in described))
                with_tokens.append(PrefixRun(parent, digests, tuple(token_ids), described[0].salt))
                parent = digests[-1]
        return tuple(with_tokens)

    # ---- facts ----

    @property
    def events(self) -> tuple[int, int]:
        """The numbers of digests that `changes` has reported as indexed and as evicted since the start."""
        return self._log.stored_pages, self._log.removed_pages

    def __len__(self) -> int:
        """Return the number of indexed digests."""
        return len(self._nodes)

    def check_integrity(self) -> None:
        """Raise Internal if the pool or the index is inconsistent.

        The checks are those of `PagePool.check_integrity`, and three more: the pool's shared and cached pages are the
        indexed ones, no path has a gap, and the pool will evict the leaves of a path first.
        """
        with self.pool.lock:
            faults = [*self.pool.faults(), *self._faults()]
        if faults:
            raise Internal(f"The page pool is inconsistent: {'; '.join(faults)}.")

    # ---- inside, under the lock ----

    def _read(self, prefix: Prefix, position: int | None) -> None:
        self._retain(prefix, self._hit(prefix.digests[: prefix.readable]), position)

    def _hit(self, digests: Sequence[bytes], stored: Stored | None = None) -> int:
        """Return the number of leading digests whose KV a request can reuse, once all `stored` pages are loaded.

        In groups with a window it is not enough that the digests are indexed: the pages in the window of the next token
        must exist.
        """
        if not self._windowed and stored is None:
            return self._path(digests)
        runs, hit = dict.fromkeys((group for group, _ in self._windowed), 0), 0
        for number, digest in enumerate(digests, 1):
            there = self._available(digest, stored)
            if not all(there[group] for group in self._full):
                break
            for group in runs:
                runs[group] = runs[group] + 1 if there[group] else 0
            if all(runs[group] >= min(needed, number) for group, needed in self._windowed):
                hit = number
        return hit

    def _available(self, digest: bytes, stored: Stored | None) -> list[bool]:
        """Return for each group of layers whether the page of this digest is indexed or stored."""
        node = self._nodes.get(digest)
        indexed = [False] * self.kv.groups if node is None else [page != FREED for page in node.pages]
        if stored is None:
            return indexed
        return [known or stored(PageKey(digest, group)) for group, known in enumerate(indexed)]

    def _has(self, key: PageKey) -> bool:
        node = self._nodes.get(key.digest)
        return node is not None and node.pages[key.group] != FREED

    def _key(self, page: int) -> PageKey:
        digest = self._digests[page]
        return PageKey(digest, self._nodes[digest].pages.index(page))

    def _path(self, digests: Sequence[bytes]) -> int:
        """Return the number of digests before the first that is not indexed; no digest after that one is indexed."""
        return next((number for number, digest in enumerate(digests) if digest not in self._nodes), len(digests))

    def _retain(self, prefix: Prefix, end: int, position: int | None) -> None:
        """Retain the pages from digest `prefix.known` to `end` that are in the windows of tokens from `position` on.

        If the pool has too few unreserved pages, only the first pages are retained; in a model with windows, none are.
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
        self._learn_tokens(prefix, first, end)
        prefix.known = max(first, end)

    def _learn_tokens(self, prefix: Prefix, first: int, end: int) -> None:
        """Report the tokens of indexed pages that were loaded without them: ahead of the prompt, or for another worker.

        The first prompt that reads such pages has their tokens.
        """
        for number in range(first, min(end, len(prefix.tokens))):
            node = self._nodes.get(prefix.digests[number])
            if node is not None and not node.tokens:
                node.tokens, node.salt = prefix.tokens[number], prefix.salt
                if self._has_states(node):
                    self._log.described(prefix.digests[number], node.parent)

    def _retain_path(self, prefix: Prefix, end: int) -> int:
        """Retain the pages that other requests have indexed from digest `prefix.known` to `end`; return the new end.

        Only pages of groups without a window are retained, and the entries of `prefix` do not change. If the pool has
        too few unreserved pages, the new end is the first digest whose pages could not be retained; else it is `end`.
        The caller publishes only pages before the new end.
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
        # A page after one that could not be retained must not be published: no lookup could find it.
        return first + whole

    def _give_published(self, owner: RequestRef, prefix: Prefix, pages: Sequence[int]) -> None:
        """Index the request's own pages in groups with windows, for the first `prefix.known` digests.

        If a group has no indexed page for a digest, for example because it was evicted, the request's page becomes the
        indexed one and is shared. If another request's page is indexed, the request's page stays its own. A digest that
        is not indexed at all is added only if all groups have windows.
        """
        for number in range(prefix.known):
            for group, _ in self._windowed:
                entry = number * self.kv.groups + group
                page = pages[entry]
                if page == FREED or prefix.pages[entry] != FREED:
                    continue
                # If another request's page is indexed already, `owner` keeps its own page.
                if self._give(owner, prefix, entry, page):
                    prefix.pages[entry] = page

    def _give(self, owner: RequestRef, prefix: Prefix, entry: int, page: int) -> bool:
        """Index and share one of the owner's pages; return True if it was shared.

        The page is not shared if its digest is not indexed, or has a page in this group already, or if its state is not
        that after its last position. If all groups have windows, a missing digest is indexed here, because then no path
        needs to lead to it.
        """
        number, group = divmod(entry, self.kv.groups)
        if number >= len(prefix.digests) or not self._complete(prefix, number, group):
            return False
        digest = prefix.digests[number]
        node = self._nodes.get(digest)
        if node is None and not self._full and self._enabled:
            node = self._nodes[digest] = self._node(prefix, number, [FREED] * self.kv.groups)
            if not self._state_groups:
                self._note_stored(digest, node.parent)
        if node is None or node.pages[group] != FREED:
            return False
        self.pool.share(owner, [page])
        node.pages[group] = page
        self._digests[page] = digest
        if group in self._state_groups and self._has_states(node):
            self._note_stored(digest, node.parent)
        return True

    def _node(self, prefix: Prefix, number: int, pages: list[int]) -> _Node:
        parent = prefix.digests[number - 1] if number else prefix.root
        tokens = prefix.tokens[number] if prefix.tokens else b""
        self._tenants[prefix.tenant] += 1
        return _Node(pages, number, parent, prefix.tenant, prefix.salt, tokens)

    def _has_states(self, node: _Node) -> bool:
        """Return True if the digest has a page in each group of state layers, if there are any."""
        return all(node.pages[group] != FREED for group in self._state_groups)

    def _complete(self, prefix: Prefix, number: int, group: int) -> bool:
        """Return True if others may reuse the request's page of this number, once it is computed."""
        return self.kv.windows[group] != STATE or number in prefix.states

    def _is_indexed(self, digest: bytes) -> bool:
        """Return True if routers know the digest as one that is on the device."""
        return (node := self._nodes.get(digest)) is not None and self._has_states(node)

    def _slowest_tier(self, digest: bytes) -> KvTier | None:
        """Return the slowest of the tiers from which a digest that is not indexed would be loaded.

        None if it cannot be loaded. A digest needs its pages of state layers, or else those of groups without a window.
        """
        needed, slowest = self._state_groups or self._full or range(self.kv.groups), None
        for key in (PageKey(digest, group) for group in needed):
            if self._has(key):
                continue
            if (tier := self._tier_of(key)) is None:
                return None
            slowest = tier if slowest is None else max(slowest, tier)
        return slowest

    def _note_tier(self, digest: bytes, tier: KvTier | None) -> None:
        if tier is None:
            self._in_tiers.pop(digest, None)
        else:
            self._in_tiers[digest] = tier

    def _note_stored(self, digest: bytes, parent: bytes) -> None:
        self._in_tiers.pop(digest, None)
        self._log.stored(digest, parent)

    def _release(self, prefix: Prefix, entry: int) -> None:
        page, prefix.pages[entry] = prefix.pages[entry], FREED
        self.pool.release([page])

    def _release_prefix(self, prefix: Prefix) -> None:
        """Release the retained pages, last page first: the pool evicts in this order, and must evict leaves first."""
        held = held_pages(prefix.pages)[::-1]
        hinted = held_pages(prefix.pages[: prefix.hinted * self.kv.groups])
        for pages, seconds in ((held, prefix.retention_s), (hinted, prefix.hinted_s)):
            if pages and seconds:
                self.pool.keep(pages, prefix.tenant, seconds)
        self.pool.release(held)
        prefix.pages.clear()
        prefix.known = 0

    def _count(self, prefix: Prefix, prompt_tokens: int) -> None:
        self.query_tokens += prompt_tokens
        self.hit_tokens += prefix.known * self.page_tokens

    def _forget(self, page: int) -> None:
        """Remove a page that the pool has evicted, and its digest too if no lookup can find the digest any longer."""
        digest = self._digests.pop(page)
        node = self._nodes[digest]
        group, reported = node.pages.index(page), self._has_states(node)
        node.pages[group] = FREED
        others = held_pages(node.pages)
        # No lookup can use a digest that lost its page in a group without a window, so its other pages are evicted with
        # it.
        if group in self._full or not others:
            del self._nodes[digest]
            self._tenants[node.tenant] -= 1
            if not self._tenants[node.tenant]:
                del self._tenants[node.tenant]
            for other_page in others:
                del self._digests[other_page]
            self.pool.drop_cached(others)
        else:
            others = []
        if self._saves is not None:
            for gone in (page, *others):
                self._saves.evicted(gone)
        if digest not in self._nodes:
            self._reloaded.discard(digest)
        if reported and not self._is_indexed(digest):
            tier = self._slowest_tier(digest)
            self._log.removed(digest, tier)
            self._note_tier(digest, tier)

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
        """Yield the inconsistencies between a node and its parent in a group without a window."""
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
            yield f"page {page_before} would be evicted before page {page} after it"
