"""The target number of workers of a cluster, and the fewest steps that reach it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.cluster import WORKERS_MAX


@dataclass(frozen=True, slots=True)
class SizeChange:
    """An operator's request for a size; see `ResizeRequest`, which defines the meaning of zeros."""

    prefill: int = 0
    decode: int = 0
    workers: int = 0
    grace_s: float = 0.0
    wait_s: float = 0.0

    def over(self, mode: Mode, now: Mapping[Role, int]) -> Counter[Role]:
        """Return the target number of workers per role, starting from `now`.

        Raises InvalidArgument, which names the option, for an impossible size.
        """
        asked = {"--prefill": self.prefill, "--decode": self.decode, "--workers": self.workers}
        of_mode = {"--prefill", "--decode"} if mode is Mode.DISAGGREGATED else {"--workers"}
        for option, count in asked.items():
            if count and option not in of_mode:
                raise InvalidArgument(option, f"the cluster is {mode}: give {' and '.join(sorted(of_mode))}")
            if not 0 <= count <= WORKERS_MAX:
                raise InvalidArgument(option, f"{count} is not between 1 and {WORKERS_MAX}")
        if not any(asked.values()):
            raise InvalidArgument(min(of_mode), "say how many workers there are to be")
        if mode is not Mode.DISAGGREGATED:
            return Counter({Role.BOTH: self.workers})
        wanted = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return Counter({role: count or max(now.get(role, 0), 1) for role, count in wanted.items()})


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps from the current workers to the wanted ones."""

    add: tuple[Role, ...] = ()
    """The roles of the workers to add, one worker for each entry."""
    leave: tuple[str, ...] = ()
    """The ids of the workers to remove; some may not serve yet."""
    into_prefill: int = 0
    """The number of serving workers that change from decode to prefill; negative = from prefill to decode."""

    @classmethod
    def to(cls, wanted: Counter[Role], here: Mapping[str, Role], awaited: Mapping[str, Role]) -> "Steps":
        """Return the steps from the current workers to `wanted`.

        `here` are the serving workers and `awaited` those that do not serve yet, each with its role; both mappings are
        in the order in which workers should be removed. A serving worker changes its role rather than being replaced by
        a new worker, because a role change loads no weights.
        """
        have = Counter(here.values())
        more = wanted.total() - len(here)
        missing, surplus = wanted - have, have - wanted
        new = Counter(list(missing.elements())[: max(more, 0)])
        going = Counter(list(surplus.elements())[: max(-more, 0)])
        flips = missing[Role.PREFILL] - new[Role.PREFILL] - (surplus[Role.PREFILL] - going[Role.PREFILL])
        kept = _take(new, dict(list(awaited.items())[::-1]))
        leave = [*_take(going, here), *(worker_id for worker_id in awaited if worker_id not in kept)]
        return cls(tuple((new - Counter(awaited.values())).elements()), tuple(leave), flips)


def _take(counts: Counter[Role], workers: Mapping[str, Role]) -> list[str]:
    """Return the first `counts[role]` workers of each role."""
    left, taken = counts.copy(), []
    for worker_id, role in workers.items():
        if left[role] > 0:
            left[role] -= 1
            taken.append(worker_id)
    return taken
