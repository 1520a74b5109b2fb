"""How many workers a cluster is to have, and the fewest steps from those that it has."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import WORKERS_MAX
from wire.errors import InvalidArgument
from wire.messages import Role
from wire.mode import Mode


@dataclass(frozen=True, slots=True)
class SizeChange:
    """What an operator asks for: see `ResizeRequest`, whose zeros mean what they mean there."""

    prefill: int = 0
    decode: int = 0
    workers: int = 0
    grace_s: float = 0.0
    wait_s: float = 0.0

    def over(self, mode: Mode, now: Mapping[Role, int]) -> Counter[Role]:
        """Workers of each part, where there are `now` of each. InvalidArgument names the option."""
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
    """From the workers that there are to those that are wanted."""

    add: tuple[Role, ...] = ()
    """A new worker for each."""
    leave: tuple[str, ...] = ()
    """Those that go, whether they serve or are only awaited."""
    into_prefill: int = 0
    """So many that serve change from decode to prefill; below 0, the other way."""

    @classmethod
    def to(cls, wanted: Counter[Role], here: Mapping[str, Role], awaited: Mapping[str, Role]) -> "Steps":
        """`here` are the workers that count, `awaited` those that do not serve yet, each with its part; in both,
        whoever should leave first is in front.

        Who is here changes its part rather than leave for another that has to start: that takes no weights to load.
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
    """The first so many of each part."""
    left, taken = counts.copy(), []
    for worker_id, role in workers.items():
        if left[role] > 0:
            left[role] -= 1
            taken.append(worker_id)
    return taken
