"""The choice of pages that are summed, and the comparison of both ends' sums."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from kv_transfer.checksums import PageChecks, chosen_pages
from tandem.protocol.errors import InvalidArgument, Unavailable
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import Lease, PageChecksum

PAGE_TOKENS = 4
TIMEOUT_S = 60


class Pages:
    """A pool whose pages hold a number each; the sum of a page also depends on how much of it counted."""

    def __init__(self) -> None:
        self.held = {20: 5, 21: 6, 22: 7}
        self.threads: set[str] = set()

    def sums(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return [1000 * self.held[page] + tokens for page, tokens in zip(pages, filled, strict=True)]


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def checks(pages: Pages) -> Iterator[PageChecks]:
    made = PageChecks(pages.sums, 1.0, KvPages(PAGE_TOKENS))
    yield made
    made.close()


def compared(checks: PageChecks, reported: Sequence[PageChecksum]) -> str:
    problems: list[str] = []
    done = threading.Event()

    def report(problem: str) -> None:
        problems.append(problem)
        done.set()

    checks.compare([20, 21, 22], reported, 2 * PAGE_TOKENS + 1, report)
    assert done.wait(TIMEOUT_S)
    return problems[0]


def lease(epoch: int) -> Lease:
    return Lease("q", 1, epoch)


@pytest.mark.parametrize(("rate", "count"), [(0.0, 0), (0.001, 1), (0.05, 2), (0.5, 20), (0.99, 40), (1.0, 40)])
def test_the_rate_is_kept_and_no_page_is_chosen_twice(rate: float, count: int) -> None:
    for epoch in range(50):
        chosen = chosen_pages(lease(epoch), 40, rate)
        assert len(chosen) == len(set(chosen)) == count
        assert list(chosen) == sorted(chosen)
        assert set(chosen) <= set(range(40))
        assert chosen == chosen_pages(lease(epoch), 40, rate)


def test_every_page_has_its_turn() -> None:
    turns = Counter(page for epoch in range(2000) for page in chosen_pages(lease(epoch), 7, 0.2))
    assert set(turns) == set(range(7))
    assert max(turns.values()) < 1.3 * min(turns.values())


def test_sums_name_the_page_of_the_prompt_and_count_what_is_filled(pages: Pages, checks: PageChecks) -> None:
    sums = checks.begin([20, 21, 22], [0, 2], 2 * PAGE_TOKENS + 1).result(TIMEOUT_S)
    assert sums == (PageChecksum(0, 5004), PageChecksum(2, 7001))
    assert pages.threads == {"page-checks"}


def test_what_arrived_is_compared_page_by_page(pages: Pages, checks: PageChecks) -> None:
    sent = checks.begin([20, 21, 22], [0, 1, 2], 2 * PAGE_TOKENS + 1).result(TIMEOUT_S)
    assert compared(checks, sent) == ""
    pages.held[20], pages.held[21] = pages.held[21], pages.held[20]
    assert compared(checks, sent) == "a checksum mismatch in page 0 and 1 more, of 3 checked"
    pages.held[20], pages.held[21] = 5, 66
    assert compared(checks, sent) == "a checksum mismatch in page 1, of 3 checked"


def test_pages_that_cannot_be_summed_are_not_right(pages: Pages, checks: PageChecks) -> None:
    sent = checks.begin([20, 21, 22], [0], 1).result(TIMEOUT_S)
    del pages.held[20]
    assert "could not be checked (KeyError)" in compared(checks, sent)
    with pytest.raises(KeyError):
        checks.begin([20], [0], 1).result(TIMEOUT_S)
    pages.held[20] = 5
    assert compared(checks, [PageChecksum(0, 5004)]) == ""


def test_a_result_that_raises_does_not_end_the_checks(checks: PageChecks) -> None:
    checks.compare([20], (), 1, lambda _: 1 / 0)  # type: ignore[arg-type]
    assert checks.begin([20], [0], 1).result(TIMEOUT_S) == (PageChecksum(0, 5001),)


def test_nothing_runs_before_the_first_sum(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that was never used needs no `close`."""
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", None)
        checks = PageChecks(pages.sums, 1.0, KvPages(PAGE_TOKENS))
    assert checks.begin([20], [0], 1).result(TIMEOUT_S) == (PageChecksum(0, 5001),)
    checks.close()


def test_what_was_asked_for_before_the_end_is_summed_and_the_rest_is_refused(pages: Pages) -> None:
    go = threading.Event()

    def slow(numbers: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> list[int]:
        assert go.wait(TIMEOUT_S)
        return pages.sums(numbers, filled, groups)

    checks = PageChecks(slow, 1.0, KvPages(PAGE_TOKENS))
    before = [checks.begin([20], [0], 1), checks.begin([21], [0], 1)]
    checks.close()
    checks.close()
    after = checks.begin([22], [0], 1)
    with pytest.raises(Unavailable, match="closing"):
        after.result(0)
    with pytest.raises(Unavailable, match="closing"):
        checks.compare([22], (), 1, lambda _: None)
    go.set()
    assert [future.result(TIMEOUT_S)[0].value for future in before] == [5001, 6001]


def test_a_rate_outside_is_refused(pages: Pages) -> None:
    for rate in (-0.1, 1.01, float("nan")):
        with pytest.raises(InvalidArgument, match="kv_checksum_rate"):
            PageChecks(pages.sums, rate, KvPages(PAGE_TOKENS))


def test_a_sum_that_does_not_come_back_shows() -> None:
    entered, go = threading.Event(), threading.Event()

    def sums(pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> list[int]:
        entered.set()
        go.wait(TIMEOUT_S)
        return [0] * len(pages)

    checks = PageChecks(sums, 1.0, KvPages(PAGE_TOKENS))
    assert checks.busy_s == 0
    done = checks.begin([20], [0], PAGE_TOKENS)
    assert entered.wait(TIMEOUT_S)
    assert checks.busy_s > 0
    go.set()
    done.result(TIMEOUT_S)
    checks.begin([20], [0], PAGE_TOKENS).result(TIMEOUT_S)
    checks.close()
    until_idle = threading.Event()
    while checks.busy_s:
        until_idle.wait(0.001)
