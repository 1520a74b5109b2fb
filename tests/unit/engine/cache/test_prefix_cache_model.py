"""The prefix cache against a brute-force reference: prefixes are tuples of tokens, and eviction scans all of them."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.prefix_cache import Prefix, PrefixCache
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.kv_pages import FREED, KvPages
from tandem.protocol.messages import Lease, RequestRef
from tests.soak import examples

TOTAL, PAGE = 12, 2
Path = tuple[object, ...]
"""A salt, and the tokens of full pages after it."""


@dataclass
class Reference:
    """The indexed paths, their readers, and the time at which each path was released."""

    readers: dict[Path, int] = field(default_factory=dict)
    left: dict[Path, tuple[int, int]] = field(default_factory=dict)
    owned: int = 0
    reserved: int = 0
    clock: int = 0

    @property
    def room(self) -> int:
        return TOTAL - self.owned - sum(count > 0 for count in self.readers.values()) - self.reserved

    def read(self, paths: list[Path]) -> list[Path]:
        """Adds one reader to the first of these, as far as they are indexed and pages are free."""
        read: list[Path] = []
        for path in paths:
            if path not in self.readers or (not self.readers[path] and not self.room):
                break
            self.readers[path] += 1
            read.append(path)
        return read

    def release(self, paths: list[Path]) -> None:
        self.clock += 1
        for path in paths:
            self.readers[path] -= 1
            self.left[path] = (self.clock, -len(path))

    def take(self, pages: int) -> None:
        """Frees pages by evicting unread ends of paths, least recently released first."""
        self.owned += pages
        while self.owned + len(self.readers) > TOTAL:
            ends = [
                path
                for path, count in self.readers.items()
                if not count and not any(other[:-PAGE] == path for other in self.readers)
            ]
            del self.readers[min(ends, key=lambda path: self.left[path])]


@dataclass
class Request:
    ref: RequestRef
    prefix: Prefix
    pages: list[int]
    paths: list[Path]
    read: list[Path]
    owned: int
    published: bool = False


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.cache = PrefixCache(self.pool, KvPages(PAGE))
        self.reference = Reference()
        self.requests: list[Request] = []
        self.pulls: list[tuple[Lease, Request]] = []
        self.started = 0
        self.queries = self.hits = 0

    @rule(salt=st.sampled_from(["", "s"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, salt: str, tokens: list[int]) -> None:
        self.started += 1
        ref = RequestRef(f"q{self.started}", 1)
        prefix = self.cache.prefix(tokens, salt)
        paths: list[Path] = [(salt, *tokens[: PAGE * n]) for n in range(1, len(tokens) // PAGE + 1)]
        needed = -(-len(tokens) // PAGE)
        read = self.reference.read(paths[: (len(tokens) - 1) // PAGE])
        if needed - len(read) > self.reference.room:
            with pytest.raises(ResourceExhausted):
                self.cache.allocate(ref, prefix, needed, len(tokens))
            self.reference.release(read)
            return
        pages, _ = self.cache.allocate(ref, prefix, needed, len(tokens))
        self.reference.take(needed - len(read))
        assert len(prefix.pages) == len(read)
        self.requests.append(Request(ref, prefix, pages, paths, read, needed - len(read)))
        self.queries += len(tokens)
        self.hits += len(read) * PAGE

    @precondition(lambda self: any(not request.published for request in self.requests))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([request for request in self.requests if not request.published]))
        request.published = True
        self.cache.publish(request.ref, request.prefix, request.pages)
        self._index(request)

    def _index(self, request: Request) -> None:
        for path in request.paths[len(request.read) :]:
            if path not in self.reference.readers:
                self.reference.readers[path] = 1
                self.reference.owned -= 1
                request.owned -= 1
                request.read.append(path)
            elif read := self.reference.read([path]):
                request.read += read
            else:
                break

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.cache.leave(request.ref, request.prefix, request.pages)
        self.reference.owned -= request.owned
        self.reference.release(request.read)

    @rule(salt=st.sampled_from(["", "s"]), tokens=st.lists(st.integers(0, 1), min_size=PAGE, max_size=9))
    def pull(self, salt: str, tokens: list[int]) -> None:
        """Advertise pages to a worker that sends a prefix."""
        self.started += 1
        lease = Lease(f"p{self.started}", 1, self.started)
        prefix = self.cache.prefix(tokens, salt)
        paths: list[Path] = [(salt, *tokens[: PAGE * n]) for n in range(1, len(tokens) // PAGE + 1)]
        indexed = next((n for n, path in enumerate(paths) if path not in self.reference.readers), len(paths))
        read = self.reference.read(paths)
        if len(read) < indexed or len(paths) - indexed > self.reference.room:
            with pytest.raises(ResourceExhausted):
                self.cache.begin_pull(lease, prefix, len(paths))
            self.reference.release(read)
            return
        pages, held = self.cache.begin_pull(lease, prefix, len(paths))
        assert held == indexed
        self.reference.take(len(paths) - held)
        ref = RequestRef(lease.request_id, 1)
        self.pulls.append((lease, Request(ref, prefix, pages, paths, read, len(paths) - held)))

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), outcome=st.sampled_from(["arrives", "is damaged", "ends"]))
    def end_pull(self, data: st.DataObject, outcome: str) -> None:
        """The pages have arrived, with the right checksums or not, or their lease has ended."""
        lease, pull = self.pulls.pop(data.draw(st.integers(0, len(self.pulls) - 1)))
        if outcome == "ends":
            if pull.owned:
                self.pool.free_lease(lease)
            self.cache.release(pull.prefix)
        else:
            if pull.owned:
                self.pool.adopt(lease, pull.ref)
            sent = [entry for entry, page in enumerate(pull.pages) if page != FREED]
            self.cache.complete_reload(pull.ref, pull.prefix, pull.pages, sent if outcome == "is damaged" else ())
            if outcome == "arrives":
                self._index(pull)
        self.reference.owned -= pull.owned
        self.reference.release(pull.read)

    @rule(pages=st.integers(0, 3))
    def reserve(self, pages: int) -> None:
        if pages > self.reference.room:
            with pytest.raises(ResourceExhausted):
                self.pool.reserve(pages)
        else:
            self.pool.reserve(pages)
            self.reference.reserved += pages

    @rule()
    def unreserve(self) -> None:
        self.pool.unreserve(self.reference.reserved)
        self.reference.reserved = 0

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        counts, reference = self.pool.counts(), self.reference
        assert len(self.cache) == len(reference.readers)
        assert counts.shared == sum(count > 0 for count in reference.readers.values())
        assert (counts.owned + counts.advertised, counts.reserved) == (reference.owned, reference.reserved)
        assert (self.cache.query_tokens, self.cache.hit_tokens) == (self.queries, self.hits)
        for request in self.requests:
            assert len(request.prefix.pages) == len(request.read)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=examples(30), stateful_step_count=40)
