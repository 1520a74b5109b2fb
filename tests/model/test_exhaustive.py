"""All states of a small world of leases: no write lands in a page of others, and nothing is left, whatever happens.

`make test` explores one attempt of a writer of one rank and of a group of two, `make soak` also two attempts;
`pytest -s` prints the number of states. Each safety measure that a mutant removes is missed in some state.
"""

from __future__ import annotations

import pytest

from kv_transfer.fence import OutstandingWrites
from kv_transfer.lease import LeaseTable
from tests.model import mutants, stories
from tests.model.checks import Broken
from tests.model.exhaustive import explore
from tests.model.mutants import Mutant
from tests.model.small_leases import SmallLeases
from tests.soak import soak


def one_epoch_for_all(patch: pytest.MonkeyPatch) -> None:
    """All leases have the same epoch."""
    grant = LeaseTable.grant

    def same(self: LeaseTable, *arguments: object) -> object:
        self._epoch = 0
        return grant(self, *arguments)  # type: ignore[arg-type]

    patch.setattr(LeaseTable, "grant", same)


def one_part_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A transfer is complete with the notice of one rank."""
    complete = LeaseTable.complete
    patch.setattr(LeaseTable, "complete", lambda self, lease, prefill, _part, _parts: complete(self, lease, prefill))


def the_grace_begins_while_writes_may_begin(patch: pytest.MonkeyPatch) -> None:
    """The grace period of a writer that is taken for dead begins although its window is open."""
    patch.setattr(OutstandingWrites, "_may_begin", lambda *_: False)


LEASE_MUTANTS = (
    mutants.revoked_pages_are_free,
    mutants.dead_writers_are_quiescent_at_once,
    mutants.a_release_is_never_in_doubt,
    stories.a_permission_is_no_bound,
    stories.renewals_are_never_refused,
    one_epoch_for_all,
    the_grace_begins_while_writes_may_begin,
)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("ranks", "attempts", "least"),
    [(1, 1, 500), (2, 1, 6_000), pytest.param(1, 2, 5_000, marks=soak), pytest.param(2, 2, 50_000, marks=soak)],
)
def test_every_state_is_safe(ranks: int, attempts: int, least: int) -> None:
    explored = explore(lambda: SmallLeases(ranks, attempts))
    print(explored)
    assert explored.states > least


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutant", LEASE_MUTANTS, ids=[mutant.__name__ for mutant in LEASE_MUTANTS])
def test_a_missing_safety_measure_is_missed_in_some_state(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Broken):
        explore(lambda: SmallLeases(1, 2))


@pytest.mark.timeout(1200)
def test_a_group_needs_the_notices_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    one_part_is_enough(monkeypatch)
    with pytest.raises(Broken, match="is admitted with"):
        explore(lambda: SmallLeases(2, 1))
