"""Learns from arriving prompts how likely it is that a conversation goes on, and when.

A prompt of the same session, or one that begins with all pages of an earlier prompt, is its next turn. The gap between
the two is observed for the tenant and the depth of the earlier prompt (the logarithm of its pages). Gaps are counted in
intervals whose lengths double; a turn without a successor counts in each interval that it has passed, and half in that
of its age, so that recent turns do not look like ended conversations. This is the life-table estimate of the gaps'
distribution (Cutler and Ederer, 1958).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.protocol.messages import CACHE_RETENTION_MAX_S

_INTERVALS = 18
"""Number of intervals: the first is 0 to 1 s, and the last ends after `CACHE_RETENTION_MAX_S`."""
_TURNS_MAX = 1 << 16
"""Maximum number of turns whose successors are awaited; beyond it the oldest turn is no longer observed."""
Group = tuple[str, int]
"""A tenant and a depth class."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A prompt whose next turn is awaited."""

    key: bytes
    """The session, or the digest of the prompt's last page if the client named no session."""
    group: Group
    began_s: float


@dataclass(slots=True)
class GapCounts:
    """The gaps between turns of one group."""

    reached: list[int] = field(default_factory=lambda: [0] * _INTERVALS)
    """Number of turns that were without a successor when each interval began."""
    continued: list[int] = field(default_factory=lambda: [0] * _INTERVALS)
    """Number of turns whose successor came within each interval."""

    @property
    def support(self) -> int:
        """The number of observed turns."""
        return self.reached[0]

    def probability(self, interval: int) -> float:
        """Return the probability that the next turn comes at all if it has not come before this interval.

        Each interval counts one more turn without a successor than was observed, so that a group is not trusted before
        it has been observed often.
        """
        none = 1.0
        for reached, continued, passed in zip(
            self.reached[interval:], self.continued[interval:], [*self.reached[interval + 1 :], 0], strict=True
        ):
            none *= 1.0 - continued / ((reached + continued + passed) / 2 + 1)
        return 1.0 - none

    @property
    def retention_s(self) -> float:
        """The age in seconds up to which the next turn is more likely to come than not; 0 if it never is."""
        for interval in range(_INTERVALS):
            if self.probability(interval) <= 0.5:
                return min(float(1 << interval >> 1), CACHE_RETENTION_MAX_S)
        return CACHE_RETENTION_MAX_S


class ReuseEstimate:
    """Observes the prompts of one router. The dispatcher owns it; all calls are on the event loop.

    An arriving prompt takes a look-up for each of its pages, and on average a few steps of earlier turns.
    """

    def __init__(self, on_gap: Callable[[float], None]) -> None:
        """`on_gap` is called with the seconds between a prompt and its next turn."""
        self._on_gap = on_gap
        self._groups: dict[Group, GapCounts] = {}
        self._awaited: dict[bytes, _Turn] = {}
        """The turns whose successors are awaited, by their keys, oldest first."""
        self._ages: list[deque[_Turn]] = [deque() for _ in range(_INTERVALS)]
        """The turns whose ages are in each interval, oldest first, with some that are no longer awaited."""

    def observe(self, tenant: str, digests: Sequence[bytes], now: float, session: str = "") -> float:
        """Observe a prompt by the digests of its full pages; return for how many seconds to keep its pages.

        `now` is the time in seconds, and `session` the client's id of its session, "" = unknown. The result is 0 if its
        next turn is not expected.
        """
        self._advance(now)
        if not digests:
            return 0.0
        named = [f"{tenant}/{session}".encode()] if session else []
        if (earlier := next(self._earlier([*digests, *named]), None)) is not None:
            gap_s = now - earlier.began_s
            self._on_gap(gap_s)
            self._groups[earlier.group].continued[min(int(gap_s).bit_length(), _INTERVALS - 1)] += 1
        group = tenant, len(digests).bit_length()
        self._await(_Turn([*digests, *named][-1], group, now))
        return self._groups[group].retention_s

    def counts(self, tenant: str, pages: int) -> GapCounts:
        """Return the gaps after prompts of this number of full pages."""
        return self._groups.get((tenant, pages.bit_length()), GapCounts())

    def _earlier(self, keys: Sequence[bytes]) -> Iterator[_Turn]:
        """Yield the turns that a prompt continues, the latest first; they are no longer awaited."""
        for key in reversed(keys):
            if (turn := self._awaited.pop(key, None)) is not None:
                yield turn

    def _await(self, turn: _Turn) -> None:
        self._groups.setdefault(turn.group, GapCounts()).reached[0] += 1
        self._awaited[turn.key] = turn
        self._ages[0].append(turn)
        if len(self._awaited) > _TURNS_MAX:
            del self._awaited[next(iter(self._awaited))]

    def _advance(self, now: float) -> None:
        """Move the awaited turns into the intervals of their ages."""
        for interval, turns in enumerate(self._ages):
            while turns and now - turns[0].began_s >= 1 << interval:
                turn = turns.popleft()
                if self._awaited.get(turn.key) is not turn:
                    continue
                if interval + 1 < _INTERVALS:
                    self._groups[turn.group].reached[interval + 1] += 1
                    self._ages[interval + 1].append(turn)
                else:
                    del self._awaited[turn.key]
