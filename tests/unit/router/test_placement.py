"""Where requests go, and who goes first."""

from dataclasses import replace
from typing import Any

from router.placement import LeastLoaded, Need, Pair, WorkerView
from router.queue import RequestQueue
from wire.messages import PeerRef, Role


def worker(name: str, role: Role, **facts: Any) -> WorkerView:
    plain = WorkerView(PeerRef(name, 1), role, 512, 4, 16, 64, True, 0, 0, 0, False)
    return replace(plain, **facts)


def names(pair: Pair | None) -> tuple[str, str] | None:
    return None if pair is None else (pair.prefill.worker_id, pair.decode.worker_id if pair.decode else "")


NEED = Need(100, 160, True)
P, D = worker("p", Role.PREFILL), worker("d", Role.DECODE)


def choose(*workers: WorkerView, need: Need = NEED) -> tuple[str, str] | None:
    return names(LeastLoaded().choose(need, workers))


def test_the_least_loaded_of_each_role() -> None:
    busy_p = worker("busy-p", Role.PREFILL, prefill_tokens=200, prefill_idle=False)
    busy_d = worker("busy-d", Role.DECODE, pages_used=30, decode_requests=1)
    assert choose(busy_p, busy_d, P, D) == ("p", "d")


def test_free_share_counts_before_the_number_of_requests() -> None:
    full = worker("full", Role.DECODE, pages_used=40, decode_requests=1)
    many = worker("many", Role.DECODE, pages_used=20, decode_requests=3)
    assert choose(P, full, many) == ("p", "many")


def test_a_request_waits_for_room() -> None:
    assert choose(worker("p", Role.PREFILL, prefill_idle=False, prefill_tokens=1024), D) is None
    assert choose(worker("p", Role.PREFILL, prefill_idle=False, prefill_tokens=1023), D) == ("p", "d")
    assert choose(P, worker("d", Role.DECODE, pages_used=55)) is None
    assert choose(P, worker("d", Role.DECODE, pages_used=54)) == ("p", "d")
    assert choose(P, worker("d", Role.DECODE, decode_requests=4)) is None
    assert choose(P, worker("d", Role.DECODE, refusing=True)) is None
    assert choose(worker("p", Role.PREFILL, refusing=True), D) is None


def test_an_idle_prefill_worker_takes_a_prompt_of_any_length() -> None:
    assert choose(worker("p", Role.PREFILL, pages_total=1000), D, need=Need(5000, 160, True)) == ("p", "d")


def test_roles_are_kept() -> None:
    assert choose(P) is None
    assert choose(D) is None
    assert choose(worker("b", Role.BOTH)) == ("b", "b")


def test_one_token_takes_no_decode_worker() -> None:
    assert choose(P, need=Need(100, 100, False)) == ("p", "")


class Waiting:
    """As much of a request as the queue looks at."""

    def __init__(self, name: str, sequence: int, priority: int = 0) -> None:
        self.wire_id, self.sequence, self.admitted = name, sequence, self
        self.priority = priority


def drained(queue: RequestQueue) -> list[str]:
    order = []
    while (head := queue.head()) is not None:
        order.append(head.wire_id)
        queue.remove(head)
    return order


def test_queue_orders_by_priority_then_arrival_and_forgets_the_departed() -> None:
    queue = RequestQueue(3)
    first, urgent, last = waiting = [Waiting("first", 1), Waiting("urgent", 2, 5), Waiting("last", 3)]
    for item in waiting:
        queue.push(item)  # type: ignore[arg-type]
    assert queue.full
    queue.remove(first)  # type: ignore[arg-type]
    queue.remove(first)  # type: ignore[arg-type]
    assert (len(queue), queue.full) == (2, False)
    queue.push(first)  # type: ignore[arg-type]
    assert drained(queue) == [urgent.wire_id, first.wire_id, last.wire_id]


def test_queue_memory_is_bounded_by_its_members() -> None:
    queue = RequestQueue(10)
    head = Waiting("head", 0, 9)
    queue.push(head)  # type: ignore[arg-type]
    for number in range(5000):
        item = Waiting(f"r{number}", number + 1)
        queue.push(item)  # type: ignore[arg-type]
        queue.remove(item)  # type: ignore[arg-type]
    assert len(queue._heap) < 100
    assert drained(queue) == ["head"]
