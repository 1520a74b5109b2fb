"""Time that hand-overs write, read while it passes."""

from threading import Thread

from prefill_worker.page_writes import WritingTime


def test_several_at_once_count_for_each_of_them() -> None:
    now = 7
    writing = WritingTime(lambda: now * 10**9)
    writing.begin()
    now += 2
    assert writing.seconds == writing.seconds == 2
    writing.begin()
    now += 3
    assert writing.seconds == 2 + 2 * 3
    writing.end()
    now += 1
    assert writing.seconds == 9
    writing.end()
    now += 5
    assert writing.seconds == 9


def test_it_never_goes_back() -> None:
    """A hand-over that begins just after a scrape has read the clock must not decrease the counter.

    Prometheus would take a decrease for a restart of the process.
    """
    now, besides = 5, []

    def clock() -> int:
        nonlocal now
        seen = now
        if besides:
            other = besides.pop()
            now += 2
            other.start()
            other.join(timeout=0.1)
        return seen * 10**9

    writing = WritingTime(clock)
    writing.begin()
    now += 5
    writing.end()
    other = Thread(target=writing.begin)
    besides.append(other)
    assert writing.seconds == 5
    other.join()
    now += 1
    assert writing.seconds == 6
