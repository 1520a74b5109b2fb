"""The processes that a start waits for."""

from __future__ import annotations

from tandem.cluster.supervision.health import ClusterHealth, Health, Phase


def one(name: str, restarts: int = 0) -> Health:
    return Health(name, Phase.STARTING, 1, 1, restarts, "")


def test_all_are_needed_unless_some_lived_before() -> None:
    router, workers = one("router"), (one("prefill-0"), one("decode-0"), one("decode-1", restarts=1))
    fresh = ClusterHealth(router, "g", "h", workers)
    assert fresh.needed == fresh.all
    taken = ClusterHealth(router, "g", "h", workers, taken_over=frozenset({"prefill-0", "decode-1"}))
    assert taken.needed == (router, workers[0]), "who did not outlive the change holds nobody up"
