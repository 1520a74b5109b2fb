"""The pool against a model that is nothing but a dict of page → state, under any sequence of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.engine.cache.page_pool import PagePool
from tandem.protocol.errors import Internal, ResourceExhausted, StaleEpoch
from tandem.protocol.messages import Lease, RequestRef
from tests.soak import examples

TOTAL = 12
owners = st.integers(0, 2).map(lambda number: RequestRef(f"r{number}", 1))
leases = st.integers(0, 1).map(lambda number: Lease(f"r{number}", 1, number + 1))
sizes = st.integers(0, 6)


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.pool = PagePool(TOTAL)
        self.state: dict[int, object] = dict.fromkeys(range(TOTAL), "free")
        self.readers: dict[int, int] = {}
        self.unread: list[int] = []
        """The cached pages, least recently read first."""
        self.reserved = 0
        self.asked = 0
        """Pages requested by the newest allocating call."""
        self.pool.on_eviction(self.taken)

    def held(self, state: object) -> list[int]:
        return [page for page, page_state in self.state.items() if page_state == state]

    def taken(self, page: int) -> None:
        assert len(self.held("free")) < self.asked, "there are enough that hold nothing"
        assert page == self.unread.pop(0)
        self.state[page] = "free"

    def room(self) -> int:
        return len(self.held("free")) + len(self.unread) - self.reserved

    def handed_out(self, pages: list[int], size: int, state: object) -> None:
        assert len(pages) == size
        for page in pages:
            assert self.state[page] == "free"
            self.state[page] = state

    @rule(size=sizes)
    def reserve(self, size: int) -> None:
        if size > self.room():
            with pytest.raises(ResourceExhausted):
                self.pool.reserve(size)
        else:
            self.pool.reserve(size)
            self.reserved += size

    @rule(size=sizes)
    def unreserve(self, size: int) -> None:
        if size > self.reserved:
            with pytest.raises(Internal):
                self.pool.unreserve(size)
        else:
            self.pool.unreserve(size)
            self.reserved -= size

    @rule(owner=owners, size=sizes, reserved=st.booleans())
    def allocate(self, owner: RequestRef, size: int, reserved: bool) -> None:
        self.asked = size
        if reserved and size > self.reserved:
            with pytest.raises(Internal):
                self.pool.allocate(owner, size, from_reserved=True)
        elif not reserved and size > self.room():
            with pytest.raises(ResourceExhausted):
                self.pool.allocate(owner, size)
        else:
            self.handed_out(self.pool.allocate(owner, size, from_reserved=reserved), size, owner)
            self.reserved -= size * reserved

    @rule(lease=leases, size=sizes)
    def advertise(self, lease: Lease, size: int) -> None:
        self.asked = size
        if self.held(("quarantined", lease)):
            with pytest.raises(StaleEpoch):
                self.pool.advertise(lease, size)
        elif size > self.reserved:
            with pytest.raises(Internal):
                self.pool.advertise(lease, size)
        else:
            self.handed_out(self.pool.advertise(lease, size), size, ("advertised", lease))
            self.reserved -= size

    def move(self, call, source: object, target: object) -> None:
        pages = self.held(source)
        if not pages:
            with pytest.raises(StaleEpoch):
                call()
            return
        call()
        self.state |= dict.fromkeys(pages, target)

    @rule(lease=leases, owner=owners)
    def adopt(self, lease: Lease, owner: RequestRef) -> None:
        self.move(lambda: self.pool.adopt(lease, owner), ("advertised", lease), owner)

    @rule(lease=leases)
    def quarantine(self, lease: Lease) -> None:
        self.move(lambda: self.pool.quarantine(lease), ("advertised", lease), ("quarantined", lease))

    @rule(lease=leases)
    def free_lease(self, lease: Lease) -> None:
        self.move(lambda: self.pool.free_lease(lease), ("advertised", lease), "free")

    @rule(lease=leases)
    def free_quarantined(self, lease: Lease) -> None:
        self.move(lambda: self.pool.free_quarantined(lease), ("quarantined", lease), "free")

    @rule(owner=owners, data=st.data())
    def free_some(self, owner: RequestRef, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(range(TOTAL)), max_size=4))
        if len(set(pages)) == len(pages) and set(pages) <= set(self.held(owner)):
            assert self.pool.free(owner, pages) == len(pages)
            self.state |= dict.fromkeys(pages, "free")
        else:
            with pytest.raises(Internal):
                self.pool.free(owner, pages)

    @rule(owner=owners)
    def free_all(self, owner: RequestRef) -> None:
        assert self.pool.free(owner) == len(self.held(owner))
        self.state |= dict.fromkeys(self.held(owner), "free")

    @rule(owner=owners, count=sizes)
    def share(self, owner: RequestRef, count: int) -> None:
        pages = self.held(owner)[:count]
        self.pool.share(owner, pages)
        self.state |= dict.fromkeys(pages, "shared")
        self.readers |= dict.fromkeys(pages, 1)

    @rule(data=st.data(), more=st.booleans())
    def read(self, data: st.DataObject, more: bool) -> None:
        known = [*self.held("shared"), *(self.unread if more else ())]
        pages = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=4)) if known else []
        if more:
            room, fit = self.room(), 0
            for page in pages:
                room -= page in self.unread
                if room < 0:
                    break
                fit += 1
            assert self.pool.retain(pages) == fit
            for page in pages[:fit]:
                self.readers[page] = self.readers.get(page, 0) + 1
            self.unread = [page for page in self.unread if page not in pages[:fit]]
            self.state |= dict.fromkeys(pages[:fit], "shared")
        else:
            for page in pages:
                self.readers[page] -= 1
            gone = [page for page in pages if self.readers[page] == 0]
            assert self.pool.release(pages) == len(gone)
            self.unread += gone
            self.state |= dict.fromkeys(gone, "cached")

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        counts = self.pool.counts()
        kinds = [page_state[0] if isinstance(page_state, tuple) else page_state for page_state in self.state.values()]
        assert counts.free == kinds.count("free")
        assert counts.shared == kinds.count("shared")
        assert counts.cached == kinds.count("cached")
        assert self.pool.readers() == {p: self.readers[p] for p in self.held("shared")} | dict.fromkeys(self.unread, 0)
        assert counts.advertised == kinds.count("advertised")
        assert counts.quarantined == kinds.count("quarantined")
        assert counts.owned == sum(isinstance(kind, RequestRef) for kind in kinds)
        assert counts.reserved == self.reserved
        for owner in (RequestRef(f"r{number}", 1) for number in range(3)):
            assert sorted(self.pool._owned.get(owner, ())) == self.held(owner)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(25), stateful_step_count=50)
