"""Checksums of the pages one hand-over sends, begun as soon as each page is final, so that none is waited for."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from kv_transfer.checksums import PageChecks
from wire.messages import Lease, PageChecksum


class OutgoingSums:
    """Of one request's chosen pages; belongs to its handoff, which frees the pages."""

    def __init__(self, checks: PageChecks | None, lease: Lease, prompt_tokens: int, skipped: int) -> None:
        """Without `checks` no page is chosen, nor are the first `skipped`, which are not sent."""
        self._checks = checks
        self._prompt_tokens = prompt_tokens
        self._chosen = () if checks is None else checks.chosen(lease, prompt_tokens, skipped)
        self._begun: list[Future[tuple[PageChecksum, ...]]] = []

    def begin(self, pages: Sequence[int], first: int, end: int) -> None:
        """The prompt's pages number `first` to `end - 1` are final; number n is `pages[n]`."""
        numbers = [number for number in self._chosen if first <= number < end]
        if self._checks is not None and numbers:
            self._begun.append(self._checks.begin(pages, numbers, self._prompt_tokens))

    async def all(self) -> tuple[PageChecksum, ...]:
        """By page number, as they were begun; raises what a sum has raised."""
        sums: list[PageChecksum] = []
        for begun in self._begun:
            # Those of earlier chunks are there: to await them is a round of the event loop each.
            some = begun.result() if begun.done() else await asyncio.wrap_future(begun)
            sums.extend(some)
        return tuple(sums)
