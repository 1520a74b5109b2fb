"""Pairs of workers that have refused each other: other releases, models or KV settings, as in a rolling update."""

import time
from collections.abc import Callable, Iterable

from wire.messages import PeerRef

MOST_PAIRS = 4096
"""The oldest is forgotten for the next."""
REMEMBERED_S = 300.0
"""Neither run can change what it is, so that this only bounds the harm of a refusal that was an accident."""


class IncompatiblePairs:
    """Learnt from attempts that were refused. A worker that registers anew is another run, and unknown here."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pairs: dict[tuple[PeerRef, PeerRef], tuple[float, str]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def learn(self, prefill: PeerRef, decode: PeerRef, why: str) -> None:
        """These two refused each other, for this reason."""
        self._pairs.pop((prefill, decode), None)
        self._pairs[prefill, decode] = self._clock() + REMEMBERED_S, why
        if len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def fit(self, prefill: PeerRef, decode: PeerRef) -> bool:
        """Whether a request may be theirs, as far as anybody knows."""
        known = self._pairs.get((prefill, decode))
        return known is None or known[0] <= self._clock()

    def forget_old(self) -> bool:
        """Whether there were any that are forgotten now, so that more may be served than before."""
        old = [pair for pair, (until_s, _) in self._pairs.items() if until_s <= self._clock()]
        for pair in old:
            del self._pairs[pair]
        return bool(old)

    def forget(self, peer: PeerRef) -> None:
        """This run is over."""
        for pair in [pair for pair in self._pairs if peer in pair]:
            del self._pairs[pair]

    def why(self, prefills: Iterable[PeerRef], decodes: Iterable[PeerRef]) -> str:
        """The reason of the first refusal between these; "" without one."""
        those = set(decodes)
        known = (self._pairs.get((prefill, decode)) for prefill in prefills for decode in those)
        return next((each[1] for each in known if each is not None), "")
