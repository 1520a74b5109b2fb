"""Computes which KV pages a request holds; engine, schedulers, transfer, router and simulation use the same rules.

A model's layers form groups (`tandem/engine/config/kv.py`). A request has a page of each group for every `page_tokens`
of its positions. In a group with a sliding window, pages before the window are freed while the request runs. The list
of a request's pages is ordered by page number, then by group: page n of group g has the index n · groups + g.

A group of state layers has pages like a group with a window, with these differences. A page has the state after the
last computed token whose position lies in the page. A step that computes the positions from `start` to `end` - 1 reads
the state from the page of position `start` - 1 and writes it to that of `end` - 1. A request never has the pages
between them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

FREED = -1
"""The value in the page list for a page that the request has freed or has never held."""
STATE = -1
"""The value in `KvPages.windows` of a group of state layers."""
_STATE_WINDOW = 2
"""The window of a group of state layers: a token reads the state after the token before it."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """The page geometry of the requests to one model on one worker."""

    page_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """The window of each group: the number of positions that a token attends to, itself included; None = all.

    STATE marks a group of state layers. These come last.
    """
    step_tokens: int = 0
    """Maximum number of prompt tokens of a step."""

    @property
    def groups(self) -> int:
        """Number of layer groups."""
        return len(self.windows)

    @property
    def full_groups(self) -> int:
        """Number of layer groups without a sliding window."""
        return self.windows.count(None)

    @property
    def state_groups(self) -> int:
        """Number of groups of state layers."""
        return self.windows.count(STATE)

    @property
    def windowed(self) -> bool:
        """True if any group has a sliding window or states."""
        return self.full_groups < self.groups

    def numbers(self, tokens: int) -> int:
        """Return the number of pages that `tokens` positions occupy in a group without a sliding window."""
        return -(-tokens // self.page_tokens)

    def tokens_of(self, pages: Sequence[int]) -> int:
        """Return the number of positions whose KV fits into a request's listed pages."""
        return len(pages) // self.groups * self.page_tokens

    def held(self, tokens: int, *, decoding: bool = False) -> int:
        """Return the maximum number of pages that a request holds at any time while it has at most `tokens` positions.

        Σ over groups min(⌈tokens / page⌉, ⌈(window + 2 · chunk) / page⌉ + 1): at most two steps are in flight, each
        with a chunk of the prompt, or with one token if the request is only `decoding`. A group of state layers has at
        most 3 pages: the one that the first of these steps reads, and the one that each of them writes.
        """
        numbers, flight = self.numbers(tokens), 2 * (1 if decoding else self.step_tokens)
        if self.windows == (None,):
            return numbers
        held = 0
        for window in self.windows:
            if window is None:
                held += numbers
            elif window == STATE:
                held += min(numbers, self.numbers(_STATE_WINDOW + flight) + 1, 3)
            else:
                held += min(numbers, self.numbers(window + flight) + 1)
        return held

    def tokens_in(self, pages: int, *, decoding: bool = False) -> int:
        """Return the maximum number of positions, in whole pages, for which `held` does not exceed `pages`.

        If `held` never exceeds `pages`, the result is above 2⁴⁰.
        """
        page = self.page_tokens
        more = bisect_right(range(1 << 40), pages, key=lambda number: self.held(number * page, decoding=decoding))
        return (more - 1) * page

    def first(self, group: int, position: int) -> int:
        """Return the number of the first page of a group that tokens at or after `position` attend to."""
        return first_page(self.windows[group], position, self.page_tokens)

    def preceding(self, group: int) -> int:
        """Return the number of pages that the first token of a page attends to besides its own page, at most."""
        window = self.windows[group]
        assert window is not None
        return self.numbers(_reach(window) - 1)

    def seen(self, position: int, first: int, end: int) -> list[int]:
        """Return the list indices, ascending, of pages to which tokens at or after `position` attend.

        Only the pages with numbers from `first` to `end - 1` are included.
        """
        groups, starts = self.groups, [self.first(group, position) for group in range(self.groups)]
        entries = product(range(first, end), range(groups))
        return [number * groups + group for number, group in entries if number >= starts[group]]

    def sent(self, tokens: int, skipped: int) -> list[int]:
        """Return the list indices, ascending, of the pages that a hand-over of `tokens` positions sends.

        The receiver already has the pages with numbers below `skipped`. Groups with a sliding window send only the
        pages that the next token attends to.
        """
        return self.seen(tokens, skipped, self.numbers(tokens))

    def missing_pages(self, numbers: int, known: int) -> int:
        """Return how many pages a reader of the first `numbers` page numbers lacks if the first `known` are there."""
        position = numbers * self.page_tokens
        return sum(numbers - max(known, self.first(group, position)) for group in range(self.groups))

    def sent_pages(self, tokens: int) -> int:
        """Return the number of pages that a hand-over of `tokens` positions sends to a worker that has cached none."""
        return sum(self.numbers(tokens) - self.first(group, tokens) for group in range(self.groups))

    def skipped(self, tokens: int, sent: int) -> int | None:
        """Return the number of leading pages that a hand-over skips if it sends `sent` pages.

        Returns None if no number of leading pages gives `sent` pages.
        """
        starts = [self.first(group, tokens) for group in range(self.groups)]
        # Pages are counted from the last one backwards, until `sent` are found; windowed groups end at their first
        # page.
        for number in range(self.numbers(tokens) - 1, -1, -1):
            sent -= sum(start <= number for start in starts)
            if sent <= 0:
                return None if sent else number
        return None

    def dead(self, pages: Sequence[int], position: int) -> list[int]:
        """Return the list indices, ascending, of held pages to which no token at or after `position` attends.

        In each group with a sliding window the held pages are consecutive: all pages before the first held one are
        already freed. The pages of a group of state layers need not be consecutive.
        """
        entries = []
        for group, window in enumerate(self.windows):
            end = min(self.first(group, position), len(pages) // self.groups)
            if window == STATE:
                column = pages[group : end * self.groups : self.groups]
                entries += [number * self.groups + group for number, page in enumerate(column) if page != FREED]
                continue
            for entry in range((end - 1) * self.groups + group, -1, -self.groups):
                if pages[entry] == FREED:
                    break
                entries.append(entry)
        return sorted(entries)


def first_page(window: int | None, position: int, page_tokens: int) -> int:
    """Return the number of the first page that tokens at or after `position` read in a group with this window."""
    return 0 if window is None else max(0, position - _reach(window) + 1) // page_tokens


def window_name(window: int | None) -> str:
    """Return an entry of `KvPages.windows` as text."""
    return "none" if window is None else "states" if window == STATE else str(window)


def _reach(window: int) -> int:
    return _STATE_WINDOW if window == STATE else window


def held_pages(pages: Sequence[int]) -> list[int]:
    """Return the pages that a request holds: the list without the freed entries."""
    return [page for page in pages if page != FREED]
