import pytest

from router.requests.chunk_budget import ChunkBudget


def test_what_is_within_the_budget_never_waits() -> None:
    budget = ChunkBudget(chunks_per_s=5000, delay_max_s=0.025)
    for step in range(200):
        for worker_s in (0.0, 0.0001):  # the steps of two workers, one right after the other
            now = step * 0.005 + worker_s
            assert budget.wait_s(now, 8) == 0.0
            budget.spend(now, 8)


def test_beyond_the_budget_chunks_leave_at_its_rate() -> None:
    budget = ChunkBudget(chunks_per_s=1000, delay_max_s=0.1)
    now, sent = 0.0, 0
    while now < 10.0:
        now += 0.001
        wait_s = budget.wait_s(now, 50)
        now += wait_s
        budget.spend(now, 50)
        sent += 50
    assert sent == pytest.approx(10 * 1000, rel=0.02)


def test_no_chunk_waits_longer_than_allowed() -> None:
    budget = ChunkBudget(chunks_per_s=10, delay_max_s=0.025)
    budget.spend(0.0, 1)
    assert budget.wait_s(0.0, 1000) == 0.025


def test_a_quiet_hour_saves_at_most_what_the_longest_wait_earns() -> None:
    budget = ChunkBudget(chunks_per_s=1000, delay_max_s=0.02)
    budget.spend(0.0, 20)
    assert budget.wait_s(3600.0, 20) == 0.0
    assert budget.wait_s(3600.0, 25) == pytest.approx(0.005)
