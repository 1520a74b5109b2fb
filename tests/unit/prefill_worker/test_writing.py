"""Time that hand-overs write, read while it passes."""

from itertools import pairwise
from threading import Thread

from prefill_worker.writing import WritingTime


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
    """Or Prometheus takes it for a process that began again: hand-overs begin and end while others read."""
    writing, seen = WritingTime(), [0.0]

    def hand_over() -> None:
        for _ in range(2000):
            writing.begin()
            writing.end()

    writers = [Thread(target=hand_over) for _ in range(3)]
    for each in writers:
        each.start()
    while any(each.is_alive() for each in writers):
        seen.append(writing.seconds)
    for each in writers:
        each.join()
    assert all(before <= after for before, after in pairwise(seen))
    assert writing.seconds == writing.seconds > 0, "none is under way"
