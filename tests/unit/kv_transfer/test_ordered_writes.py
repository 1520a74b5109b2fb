"""The begin of a write that depends on others, and the cases in which it never begins."""

import threading
from concurrent.futures import Future
from itertools import permutations

import pytest

from kv_transfer.base import WriteDone
from kv_transfer.ordered_writes import hold
from tandem.protocol.errors import TransferFailed

DONE = WriteDone(1, 1, 1)


def test_without_others_it_begins_at_once() -> None:
    begun: list[str] = []
    hold((), begun.append)
    assert begun == [""]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_it_begins_once_with_the_last_that_lands(order: tuple[int, ...]) -> None:
    begun: list[str] = []
    others: list[Future[WriteDone]] = [Future() for _ in range(3)]
    others[order[0]].set_result(DONE)  # one is over before it is asked for
    hold(others, begun.append)
    others[order[1]].set_result(DONE)
    assert begun == []
    others[order[2]].set_result(DONE)
    assert begun == [""]


@pytest.mark.parametrize("failed", range(3))
def test_it_never_begins_once_one_has_failed(failed: int) -> None:
    reasons: list[str] = []
    others: list[Future[WriteDone]] = [Future() for _ in range(3)]
    hold(others, reasons.append)
    for number, other in enumerate(others):
        if number == failed:
            other.set_exception(TransferFailed("the connection failed"))
            assert reasons == ["a write that it depends on has failed"], "at once: nothing of it moves"
        else:
            other.set_result(DONE)
    assert len(reasons) == 1


def test_it_begins_on_the_thread_that_finds_the_last_one_over() -> None:
    threads: list[str] = []
    other: Future[WriteDone] = Future()
    hold((other,), lambda _: threads.append(threading.current_thread().name))
    finder = threading.Thread(target=other.set_result, args=(DONE,), name="transfer")
    finder.start()
    finder.join()
    assert threads == ["transfer"]
