"""What a step brought, for the routers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from decode_worker.landed import Landed
from wire.messages import RoutedEvent, RoutedTokens


@dataclass(frozen=True, slots=True, eq=False)
class StepNews(Sequence[RoutedEvent]):
    """Of a request at most once. As a sequence: all of it as events, made anew each time."""

    events: Sequence[RoutedEvent] = ()
    landed: Landed | None = None
    """Where the tokens of all others are."""

    @property
    def tokens(self) -> Sequence[RoutedTokens]:
        """Of requests of which there is nothing else to tell, made anew each time: to be asked for once, and before the
        next step is planned.
        """
        return () if self.landed is None else self.landed.usual()

    def __len__(self) -> int:
        return sum(len(each.tokens) for each in self.tokens) + len(self.events)

    def __iter__(self) -> Iterator[RoutedEvent]:
        plain = (RoutedEvent(each.router_id, event) for each in self.tokens for event in each.tokens.events())
        return chain(self.events, plain)

    @overload
    def __getitem__(self, at: int) -> RoutedEvent: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[RoutedEvent]: ...
    def __getitem__(self, at: int | slice) -> RoutedEvent | Sequence[RoutedEvent]:
        return list(self)[at]


NO_NEWS = StepNews()
