"""Tests of the order of waiting requests and of the fairness between tenants."""

import pytest

from router.placement.queue import QueuedRequest, RequestQueue


def queued(name: str, sequence: int, start_by_s: float = 0.0, **more: object) -> QueuedRequest:
    made = QueuedRequest(name, sequence, 0.0, 100, 10, **more)  # type: ignore[arg-type]
    made.start_by_s, made.service_s = start_by_s, 0.5
    return made


def drained(queue: RequestQueue, charge: float = 0.0) -> list[str]:
    order = []
    while (head := queue.head()) is not None:
        order.append(head.internal_id)
        queue.remove(head)
        queue.charge(head.tenant, charge)
    return order


def filled(queue: RequestQueue, *requests: QueuedRequest) -> RequestQueue:
    for request in requests:
        queue.push(request)
    return queue


def test_priority_then_slack_then_arrival() -> None:
    """The lower priority goes first, as in vLLM."""
    waiting = [
        queued("late", 1, 5.0),
        queued("soon", 2, 1.0),
        queued("soon-too", 3, 1.0),
        queued("urgent", 4, 9.0, priority=-1),
        queued("patient", 0, 0.0, priority=1),
    ]
    assert drained(filled(RequestQueue(), *waiting)) == ["urgent", "soon", "soon-too", "late", "patient"]


def test_removed_requests_are_forgotten_and_one_that_comes_back_keeps_its_position() -> None:
    first, second, third = waiting = [queued(name, n) for n, name in enumerate(("a", "b", "c"))]
    queue = filled(RequestQueue(), *waiting)
    assert len(queue) == 3
    queue.remove(first)
    queue.remove(first)
    assert len(queue) == 2
    queue.push(first)
    assert drained(queue) == [request.internal_id for request in (first, second, third)]
    assert (len(queue._tenants), queue.ahead(queued("next", 9, 1e9))) == (0, (0.0, 0))


def test_memory_is_bounded_by_its_members() -> None:
    queue = RequestQueue()
    queue.push(queued("head", 0, priority=-9))
    for number in range(5000):
        item = queued(f"r{number}", number + 1)
        queue.push(item)
        queue.remove(item)
    assert len(queue._tenants[""]) == 1
    assert drained(queue) == ["head"]


def test_a_request_that_comes_back_with_less_urgency_is_further_back() -> None:
    first, second = queued("first", 1, 1.0), queued("second", 2, 2.0)
    queue = filled(RequestQueue(), first, second)
    queue.remove(first)
    first.start_by_s = 30.0
    queue.push(first)
    assert drained(queue) == ["second", "first"]


def test_a_flood_of_one_tenant_costs_another_no_turn() -> None:
    flood = [queued(f"flood-{n}", n, tenant="flood") for n in range(100)]
    small = [queued(f"small-{n}", 100 + n, start_by_s=50.0, tenant="small") for n in range(5)]
    order = drained(filled(RequestQueue(), *flood, *small), charge=100)
    assert [order.index(f"small-{n}") for n in range(5)] == [1, 3, 5, 7, 9]


def test_priority_does_not_overtake_other_tenants() -> None:
    loud = [queued(f"loud-{n}", n, tenant="loud", priority=-(10**6)) for n in range(4)]
    meek = [queued(f"meek-{n}", 10 + n, tenant="meek") for n in range(4)]
    order = drained(filled(RequestQueue(), *loud, *meek), charge=1)
    assert order == ["loud-0", "meek-0", "loud-1", "meek-1", "loud-2", "meek-2", "loud-3", "meek-3"]


def test_what_was_not_asked_for_is_not_saved_up() -> None:
    queue = filled(RequestQueue(), *(queued(f"old-{n}", n, tenant="old") for n in range(30)))
    for _ in range(20):
        head = queue.head()
        assert head is not None
        queue.remove(head)
        queue.charge("old", 100)
    filled(queue, *(queued(f"new-{n}", 50 + n, tenant="new") for n in range(10)))
    order = drained(queue, charge=100)
    assert [name.split("-")[0] for name in order[:6]] == ["old", "new"] * 3


def test_the_requests_of_a_tenant_are_counted() -> None:
    queue = filled(RequestQueue(), queued("a", 1, tenant="x"), skipped := queued("b", 2, tenant="x"))
    queue.skip(skipped)
    assert (queue.count_of("x"), queue.count_of("y"), len(queue)) == (2, 0, 2)


def test_how_much_is_ahead() -> None:
    flood = [queued(f"flood-{n}", n, start_by_s=1.0, tenant="flood") for n in range(10)]
    queue = filled(RequestQueue(), *flood, queued("mine", 20, start_by_s=2.0, tenant="me"))

    def ahead(tenant: str, start_by_s: float, priority: int = 0) -> float:
        return queue.ahead(queued("next", 99, start_by_s, tenant=tenant, priority=priority))[0]

    assert ahead("flood", 1.0) == 5.0
    assert ahead("flood", 0.5) == 0.0, "less urgent ones are not before it"
    assert ahead("flood", 9.0, priority=-1) == 0.0, "it goes before its tenant's others"
    assert ahead("flood", 0.5, priority=1) == 5.0, "its tenant's others go before it"
    assert ahead("me", 3.0) == 1.0, "own work, and as much of the others'"
    assert ahead("third", 3.0) == 0.0


@pytest.mark.parametrize(
    ("prior_output_tokens", "limit", "decodes"), [(0, 1, False), (0, 2, True), (3, 4, False), (3, 5, True)]
)
def test_it_decodes_if_a_token_follows_the_one_that_prefill_generates(
    prior_output_tokens: int, limit: int, decodes: bool
) -> None:
    assert QueuedRequest("q", 1, 0.0, 100, limit, prior_output_tokens=prior_output_tokens).decodes == decodes


@pytest.mark.parametrize(
    ("prior_output_tokens", "expected", "reserved"),
    [(0, None, 149), (0, 20, 119), (9, 20, 119), (30, 20, 130), (0, 50, 149)],
)
def test_kv_is_reserved_for_the_expected_answer_and_for_what_is_prefilled(
    prior_output_tokens: int, expected: int | None, reserved: int
) -> None:
    """The newest token of an answer has no KV yet."""
    request = QueuedRequest(
        "q", 1, 0.0, 100, 50, prior_output_tokens=prior_output_tokens, expected_tokens=expected, mean_tokens=17.0
    )
    assert request.prefill_tokens == 100 + prior_output_tokens
    assert (request.kv_tokens, request.reserved_tokens) == (149, reserved)
    assert request.decode_context == 100 + prior_output_tokens + 8


def test_a_tenant_that_comes_back_begins_with_what_it_was_given_above_the_level() -> None:
    queue = RequestQueue()
    for number in range(2):
        queue.remove(filled(queue, queued(f"old-{number}", number, tenant="old")).head())  # type: ignore[arg-type]
        queue.charge("old", 100)
    queue.remove(filled(queue, queued("other", 5, tenant="other")).head())  # type: ignore[arg-type]
    filled(queue, *(queued(f"new-{n}", 10 + n, tenant="new") for n in range(7)))
    filled(queue, *(queued(f"old-{n}", 20 + n, tenant="old") for n in range(3)))
    order = [name.split("-")[0] for name in drained(queue, charge=30)]
    # The level is 100, which was the least when nobody waited any more; "old" has 200.
    assert order == ["new"] * 4 + ["old", "new", "old", "new", "old", "new"]


def test_tenants_that_come_and_go_are_forgotten() -> None:
    queue = filled(RequestQueue(), queued("waits", 0, tenant="waits"))
    for number in range(1000):
        queue.push(item := queued("q", number + 1, tenant=f"tenant-{number}"))
        queue.remove(item)
    assert len(queue._given) <= 2


def test_of_tenants_that_were_given_the_same_the_one_with_least_slack_is_next() -> None:
    late, soon = queued("late", 1, 5.0, tenant="a"), queued("soon", 2, 1.0, tenant="b")
    first, second = queued("first", 3, 7.0, tenant="c"), queued("second", 4, 7.0, tenant="d")
    assert drained(filled(RequestQueue(), second, first, late, soon)) == ["soon", "late", "first", "second"]


def test_resumed_requests_go_first_in_order_of_arrival_and_are_ahead_of_all() -> None:
    again = [queued(f"again-{n}", n, 9.0, resumed=True, tenant="x") for n in (7, 3)]
    queue = filled(RequestQueue(), queued("urgent", 1, 0.0, priority=-9), *again)
    assert (len(queue), queue.count_of("x")) == (3, 0)
    assert queue.ahead(queued("next", 9, 5.0, tenant="y")) == (0.0, 2)
    assert queue.ahead(queued("next", 9, 5.0)) == (0.5, 3)
    assert drained(queue) == ["again-3", "again-7", "urgent"]


def test_others_that_start_at_the_same_time_are_ahead() -> None:
    mine = [queued(f"mine-{n}", n, 1.0, tenant="me") for n in range(2)]
    queue = filled(RequestQueue(), *mine, *(queued(f"other-{n}", 5 + n, 2.0, tenant="other") for n in range(9)))
    assert queue.ahead(queued("next", 99, 1.9, tenant="me")) == (1.0, 2)
    assert queue.ahead(queued("next", 99, 2.0, tenant="me")) == (2.0, 4), "no more than its own times the tenants"
    queue.remove(mine[0])
    assert queue.ahead(queued("next", 99, 2.0, tenant="other", priority=-1)) == (0.0, 0)
    alone = filled(RequestQueue(), *mine, queued("other", 5, 2.0, tenant="other"))
    assert alone.ahead(queued("next", 99, 2.0, tenant="me")) == (1.5, 3)
